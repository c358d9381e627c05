import { describe, expect, it } from "vitest";
import {
  continuedTimeUse,
  kindsOf,
  readTimeUse,
  timeUse,
  type SpanKind,
  type Timeline,
} from "../src/lib/timeline";
import { fromJson, newSession, toJson } from "../src/lib/transfer";
import { randomOf } from "./random";

function timeline(spans: [SpanKind, number, string[]?][]): Timeline {
  let now = 0;
  const sums: Timeline["sums"] = {};
  const made = spans.map(([kind, ms, by = []]) => {
    sums[kind] = (sums[kind] ?? 0) + ms;
    return { kind, startMs: now, endMs: (now += ms), by };
  });
  return { arrivedMs: 0, totalMs: now, isOver: true, spans: made, sums, draftTokens: 0, acceptedTokens: 0 };
}

describe("the bar of a request", () => {
  it("has its spans in order and what caused them", () => {
    const use = timeUse(
      timeline([
        ["queued", 100, ["a", "b"]],
        ["own_chunk", 50],
        ["decode", 200],
        ["queued", 40, ["b", "c"]],
      ]),
      (id) => `chat ${id}`,
    );
    expect(use.stretches).toEqual([
      { kind: "queued", ms: 100 },
      { kind: "own_chunk", ms: 50 },
      { kind: "decode", ms: 200 },
      { kind: "queued", ms: 40 },
    ]);
    expect(use.by).toEqual({ queued: ["chat a", "chat b", "chat c"] });
    expect(kindsOf(use)).toEqual([
      { kind: "decode", ms: 200 },
      { kind: "queued", ms: 140 },
      { kind: "own_chunk", ms: 50 },
    ]);
  });

  it.each([1, 2, 3])("is short, and as long as the time (seed %i)", (seed) => {
    const random = randomOf(seed);
    const kinds: SpanKind[] = ["decode", "other_chunk", "preempted"];
    const spans = Array.from({ length: 256 }, (_, i): [SpanKind, number] => [
      kinds[i % 3]!,
      1 + random.int(random.int(9) === 0 ? 1000 : 10),
    ]);
    const given = timeline(spans);
    const use = timeUse(given, (id) => id);
    expect(use.stretches.length).toBeLessThanOrEqual(81);
    expect(use.stretches.reduce((sum, { ms }) => sum + ms, 0)).toBeCloseTo(given.totalMs);
    let joined = use;
    for (let i = 0; i < 5; i++) joined = continuedTimeUse(joined, use);
    expect(joined.stretches.length).toBeLessThanOrEqual(160);
    expect(joined.sums.decode).toBeCloseTo(6 * given.sums.decode!);
  });

  it("survives an export, and nothing of a file is believed", () => {
    const timeUse = { stretches: [{ kind: "decode" as const, ms: 5 }], sums: { decode: 5 }, by: {} };
    const message = {
      id: "m",
      parent: null,
      role: "assistant" as const,
      content: "x",
      createdMs: 1,
      timeUse,
    };
    const [read] = fromJson(toJson([{ session: newSession(1), messages: [message] }]), 2).wholes;
    expect(read!.messages[0]!.timeUse).toEqual(timeUse);
    for (const value of [null, 7, {}, { stretches: 1, sums: {} }, { stretches: [], sums: null }]) {
      expect(readTimeUse(value)).toBeNull();
    }
    const hostile = {
      stretches: [null, { kind: "decode", ms: -1 }, { kind: "url(x)", ms: 1 }, { kind: "queued", ms: 2 }],
      sums: { queued: 2, decode: "1", other: 3 },
      by: { queued: ["a", 1, "b", "c", "d", "e"], decode: 7 },
    };
    expect(readTimeUse(hostile)).toEqual({
      stretches: [{ kind: "queued", ms: 2 }],
      sums: { queued: 2 },
      by: { queued: ["a", "b", "c", "d"] },
    });
  });
});
