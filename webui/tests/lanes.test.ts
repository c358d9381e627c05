import { describe, expect, it } from "vitest";
import { blocksOf, gradientOf, WINDOW_MS } from "../src/lib/lanes";
import { sampleOf } from "../src/lib/metrics";
import type { SpanKind, Timeline } from "../src/lib/timeline";

function timeline(arrivedMs: number, spans: [SpanKind, number][]): Timeline {
  let now = 0;
  const made = spans.map(([kind, ms]) => ({ kind, startMs: now, endMs: (now += ms), by: [] }));
  const rest = { isOver: false, sums: {}, draftTokens: 0, acceptedTokens: 0 };
  return { arrivedMs, totalMs: now, spans: made, ...rest };
}

describe("a lane", () => {
  it("shows the part of a request in the last minute", () => {
    const now = 1_000_000;
    const long = timeline(now - 90_000, [["queued", 45_000], ["own_chunk", 15_000], ["decode", 30_000]]); // prettier-ignore
    expect(blocksOf(long, now)).toEqual([
      { kind: "queued", from: 0, to: 0.25, ms: 45_000 },
      { kind: "own_chunk", from: 0.25, to: 0.5, ms: 15_000 },
      { kind: "decode", from: 0.5, to: 1, ms: 30_000 },
    ]);
    expect(blocksOf(timeline(now - 3 * WINDOW_MS, [["decode", 1000]]), now)).toEqual([]);
  });

  it("has a bounded number of blocks", () => {
    const spans = Array.from({ length: 2000 }, (_, i): [SpanKind, number] => [
      i % 2 ? "decode" : "other_chunk",
      30,
    ]);
    const blocks = blocksOf(timeline(0, spans), 60_000);
    expect(blocks.length).toBeLessThanOrEqual(300);
    expect(blocks[0]!.from).toBe(0);
    expect(blocks.at(-1)!.to).toBe(1);
  });

  it("is drawn as one background", () => {
    expect(gradientOf([{ kind: "decode", from: 0.25, to: 0.5, ms: 1 }])).toBe(
      "linear-gradient(to right, transparent 0.00% 25.00%, var(--kind-decode) 25.00% 50.00%, transparent 50.00%)",
    );
    expect(gradientOf([])).toBe("linear-gradient(to right, transparent 0.00%)");
  });
});

it("a sample has the KV cells by state, of all models", () => {
  const text = [
    'llaisys:kv_cells{engine="0",model_name="a",state="used"} 5.0',
    'llaisys:kv_cells{engine="0",model_name="a",state="cached"} 20.0',
    'llaisys:kv_cells{engine="0",model_name="a",state="free"} 75.0',
    'llaisys:kv_cells{engine="0",model_name="b",state="used"} 2.0',
  ].join("\n");
  expect(sampleOf(text, 0)).toMatchObject({ kvCells: 102, usedCells: 7, cachedCells: 20 });
});
