/** Seeded random numbers (mulberry32): a failing case is run again from the seed in its name. */
export function randomOf(seed: number) {
  let state = seed >>> 0;
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  const int = (below: number) => Math.floor(next() * below);
  return { next, int, pick: <T>(items: readonly T[]): T => items[int(items.length)]! };
}

/** The text in random pieces of 1 to `most` characters. */
export function cut(text: string, most: number, random: ReturnType<typeof randomOf>): string[] {
  const out: string[] = [];
  for (let at = 0; at < text.length;) {
    const end = at + 1 + random.int(most);
    out.push(text.slice(at, end));
    at = end;
  }
  return out;
}
