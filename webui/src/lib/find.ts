// Finds a text in the messages of one chat, in any letter case.

const HITS_MAX = 9999;

/** A hit: the message, and which of the hits in that message it is. */
export interface FindHit {
  id: string;
  nth: number;
}

/** What matches the query; null for an empty one. */
export function patternOf(query: string): RegExp | null {
  if (query.trim() === "") return null;
  return new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");
}

/** The hits in messages, first to last, up to a bound. */
export function hitsIn(
  messages: readonly { id: string; content: string }[],
  pattern: RegExp | null,
): FindHit[] {
  const hits: FindHit[] = [];
  if (pattern === null) return hits;
  const count = (text: string) => text.match(pattern)?.length ?? 0;
  for (const { id, content } of messages) {
    // Bold text and code are shown without their marks.
    const n = Math.max(count(content), count(content.replaceAll("**", "").replaceAll("`", "")));
    for (let nth = 0; nth < n; nth++) hits.push({ id, nth });
    if (hits.length >= HITS_MAX) return hits.slice(0, HITS_MAX);
  }
  return hits;
}

/** The places of the hits in an element's text, also across the tags inside it. */
export function rangesIn(element: Element, pattern: RegExp): Range[] {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const nodes: { node: Node; from: number }[] = [];
  let text = "";
  while (walker.nextNode()) {
    nodes.push({ node: walker.currentNode, from: text.length });
    text += walker.currentNode.nodeValue;
  }
  const place = (at: number) => {
    const { node, from } = nodes.findLast((other) => other.from <= at)!;
    return { node, offset: at - from };
  };
  return [...text.matchAll(pattern)].map(({ index, 0: { length } }) => {
    const range = document.createRange();
    const start = place(index);
    const last = place(index + length - 1);
    range.setStart(start.node, start.offset);
    range.setEnd(last.node, last.offset + 1);
    return range;
  });
}
