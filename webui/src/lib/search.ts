// Search through titles and texts: every word must occur, in any order; case and width of letters do not matter.

const BEFORE = 30;
const AFTER = 90;

export interface Snippet {
  before: string;
  hit: string;
  after: string;
}

function plain(text: string): string {
  return text.normalize("NFKC").toLowerCase();
}

/** The words of a query; none if there is nothing to look for. */
export function words(query: string): string[] {
  return plain(query).split(/\s+/).filter(Boolean);
}

/** True if each word occurs in one of the texts. */
export function matches(texts: readonly string[], wanted: readonly string[]): boolean {
  const all = texts.map(plain);
  return wanted.every((word) => all.some((text) => text.includes(word)));
}

/** The surroundings of the first word that occurs, on one line; null if none does. */
export function snippet(text: string, wanted: readonly string[]): Snippet | null {
  const line = text.replace(/\s+/g, " ");
  const lower = line.toLowerCase();
  for (const word of wanted) {
    const at = lower.indexOf(word);
    if (at < 0) continue;
    const start = Math.max(0, at - BEFORE);
    const end = at + word.length;
    return {
      before: (start > 0 ? "…" : "") + line.slice(start, at),
      hit: line.slice(at, end),
      after: line.slice(end, end + AFTER),
    };
  }
  return null;
}
