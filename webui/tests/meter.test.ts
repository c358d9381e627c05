import { expect, it } from "vitest";
import { computedTokens, fillOf } from "../src/lib/meter";
import type { Message } from "../src/lib/types";

it("a context has cached, new and free tokens", () => {
  const rest = { limit: 1000, state: "fits" };
  expect(fillOf(1000, 300, 200, null)).toEqual({ ...rest, cached: 200, fresh: 100, free: 700 });
  expect(fillOf(1000, 300, 400, null)).toEqual({ ...rest, cached: 300, fresh: 0, free: 700 });
});

it.each([
  [900, null, "fits"],
  [901, null, "tight"],
  [901, 99, "fits"],
  [902, 99, "tight"],
  [500, 800, "fits"],
  [999, null, "tight"],
  [1000, null, "over"],
  [1200, 5, "over"],
])("of 1000 tokens, %d with answers of %j: %s", (tokens, maxTokens, state) => {
  expect(fillOf(1000, tokens, 0, maxTokens).state).toBe(state);
});

it("the newest answer's tokens were computed, by a server that has run since", () => {
  const usage = { promptTokens: 50, cachedTokens: 0, completionTokens: 7 };
  const answer: Message = { id: "a", parent: null, role: "assistant", content: "x", createdMs: 100, usage };
  const question: Message = { id: "q", parent: "a", role: "user", content: "y", createdMs: 200 };
  expect(computedTokens([answer, question], 0)).toBe(57);
  expect(computedTokens([{ ...answer, reasoning: "hm" }], 0)).toBe(50);
  expect(computedTokens([answer], 150)).toBe(0);
  expect(computedTokens([question], 0)).toBe(0);
});
