// The requests of the last minute, each as a lane of blocks in time.

import type { SpanKind, Timeline } from "./timeline";

export const WINDOW_MS = 60_000;

export interface RequestTimeline {
  id: string;
  timeline: Timeline;
}

export interface Block {
  kind: SpanKind;
  /** Shares of the window, 0 is its beginning. */
  from: number;
  to: number;
  ms: number;
}

/** What is shorter than this share of the window is not seen: it belongs to the block before. */
const SHARE_LEAST = 1 / 300;

/** The blocks of a request in the window that ends now. */
export function blocksOf({ arrivedMs, spans }: Timeline, nowMs: number): Block[] {
  const place = (ms: number) => 1 - (nowMs - arrivedMs - ms) / WINDOW_MS;
  const blocks: Block[] = [];
  for (const { kind, startMs, endMs } of spans) {
    const from = Math.max(0, place(startMs));
    const to = Math.min(1, place(endMs));
    if (to <= from) continue;
    const last = blocks.at(-1);
    if (last && (last.kind === kind || to - from < SHARE_LEAST)) {
      last.to = to;
      last.ms += endMs - startMs;
    } else blocks.push({ kind, from, to, ms: endMs - startMs });
  }
  return blocks;
}

/** The background of a lane: its blocks in the colors of their kinds. */
export function gradientOf(blocks: readonly Block[]): string {
  const percent = (share: number) => `${(100 * share).toFixed(2)}%`;
  const stops: string[] = [];
  let at = 0;
  for (const { kind, from, to } of blocks) {
    stops.push(`transparent ${percent(at)} ${percent(from)}`);
    stops.push(`var(--kind-${kind}) ${percent(from)} ${percent(to)}`);
    at = to;
  }
  stops.push(`transparent ${percent(at)}`);
  return `linear-gradient(to right, ${stops.join(", ")})`;
}
