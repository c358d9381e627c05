// The difference of two texts, by words: Myers' greedy algorithm, with a bound on its work.

export interface Part {
  kind: "same" | "old" | "new";
  text: string;
}

/** More edits than this are not looked for; the texts are then compared by lines. */
const EDITS_MAX = 1500;

/** What was taken out of `before` and put into `after`, in order. */
export function diff(before: string, after: string): Part[] {
  return joined(byTokens(before, after, words) ?? byTokens(before, after, lines) ?? replaced(before, after));
}

// CJK text has no spaces between words: each of its characters counts as one.
const words = (text: string) =>
  text.match(/[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}]|[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) ?? [];
const lines = (text: string) => text.match(/[^\n]*\n|[^\n]+$/g) ?? [];
const replaced = (before: string, after: string): Part[] => [
  { kind: "old", text: before },
  { kind: "new", text: after },
];

/** Null if there are too many edits. */
function byTokens(before: string, after: string, split: (text: string) => string[]): Part[] | null {
  const [a, b] = [split(before), split(after)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let [endA, endB] = [a.length, b.length];
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) [endA, endB] = [endA - 1, endB - 1];
  const middle = shortest(a.slice(start, endA), b.slice(start, endB));
  if (middle === null) return null;
  const same = (tokens: string[]): Part => ({ kind: "same", text: tokens.join("") });
  return [same(a.slice(0, start)), ...middle, same(a.slice(endA))];
}

/** A shortest edit script; null if it is longer than the bound. */
function shortest(a: readonly string[], b: readonly string[]): Part[] | null {
  const size = Math.min(EDITS_MAX, a.length + b.length);
  // furthest[k + size]: how far into `a` the paths on diagonal k reach; a copy for each number of edits.
  const furthest = new Int32Array(2 * size + 2);
  const trace: Int32Array[] = [];
  for (let edits = 0; edits <= size; edits++) {
    trace.push(furthest.slice());
    for (let k = -edits; k <= edits; k += 2) {
      let x = isDown(furthest, size, k, edits) ? furthest[size + k + 1]! : furthest[size + k - 1]! + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      furthest[size + k] = x;
      if (x >= a.length && x - k >= b.length) return script(a, b, trace, size);
    }
  }
  return null;
}

/** Whether the path to diagonal k came from the one above: by an insertion. */
function isDown(furthest: Int32Array, size: number, k: number, edits: number): boolean {
  return k === -edits || (k !== edits && furthest[size + k - 1]! < furthest[size + k + 1]!);
}

function script(a: readonly string[], b: readonly string[], trace: Int32Array[], size: number): Part[] {
  const parts: Part[] = [];
  let [x, y] = [a.length, b.length];
  for (let edits = trace.length - 1; edits >= 0; edits--) {
    const furthest = trace[edits]!;
    const k = x - y;
    const down = isDown(furthest, size, k, edits);
    const fromX = edits === 0 ? 0 : furthest[size + (down ? k + 1 : k - 1)]!;
    const fromY = edits === 0 ? 0 : fromX - (down ? k + 1 : k - 1);
    while (x > fromX && y > fromY) {
      parts.push({ kind: "same", text: a[--x]! });
      y--;
    }
    if (edits === 0) break;
    parts.push(down ? { kind: "new", text: b[--y]! } : { kind: "old", text: a[--x]! });
  }
  return parts.reverse();
}

/** Parts of one kind in a row become one; between two equal parts, what is gone comes before what is new. */
function joined(parts: readonly Part[]): Part[] {
  const out: Part[] = [];
  let [old, fresh] = ["", ""];
  const flush = () => {
    if (old) out.push({ kind: "old", text: old });
    if (fresh) out.push({ kind: "new", text: fresh });
    [old, fresh] = ["", ""];
  };
  for (const { kind, text } of parts) {
    if (kind === "old") old += text;
    else if (kind === "new") fresh += text;
    else if (text) {
      flush();
      const last = out.at(-1);
      if (last?.kind === "same") last.text += text;
      else out.push({ kind, text });
    }
  }
  flush();
  return out;
}
