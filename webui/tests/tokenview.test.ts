import { expect, it, vi } from "vitest";

it("keeps a bounded number of tokens, the newest", async () => {
  vi.stubGlobal("navigator", { languages: ["en"] });
  const { tokenView } = await import("../src/state/tokens.svelte");
  const message = (i: number) => ({ id: `m${i}`, parent: null, role: "assistant" as const, createdMs: i });
  const units = Array.from({ length: 10_000 }, () => ({ text: "a", logprob: -1, top: [] }));
  const content = "a".repeat(units.length);
  for (let i = 0; i < 5; i++) tokenView.keep(`m${i}`, units);
  const kept = [0, 1, 2, 3, 4].filter((i) => tokenView.units({ ...message(i), content }, false));
  expect(kept).toEqual([2, 3, 4]);
  expect(tokenView.units({ ...message(4), content: content + "b" }, false)).toBeNull();
});
