import { describe, expect, it } from "vitest";
import { hitsIn, patternOf } from "../src/lib/find";
import { matches, snippet, words } from "../src/lib/search";

describe("search", () => {
  it("wants every word, in any order, case and width", () => {
    expect(words("  Ｔｉｄｅ  MOON ")).toEqual(["tide", "moon"]);
    expect(matches(["The Moon", "makes a tide"], words("tide moon"))).toBe(true);
    expect(matches(["The Moon"], words("tide moon"))).toBe(false);
    expect(matches(["潮汐是什么"], words("潮汐"))).toBe(true);
  });

  it("shows the surroundings of a hit on one line", () => {
    const text = `${"before ".repeat(20)}the\nTide ${"after ".repeat(40)}`;
    const found = snippet(text, ["tide"])!;
    expect(found.hit).toBe("Tide");
    expect(found.before.startsWith("…")).toBe(true);
    expect(found.before.endsWith("the ")).toBe(true);
    expect(found.after.length).toBeLessThanOrEqual(90);
    expect(snippet("nothing", ["tide"])).toBeNull();
  });
});

describe("find in chat", () => {
  const messages = [
    { id: "a", content: "Tides and tides, ti**des**" },
    { id: "b", content: "none (a.b)" },
    { id: "c", content: "2**3 TIDES" },
  ];
  const find = (query: string) => hitsIn(messages, patternOf(query)).map(({ id, nth }) => `${id}${nth}`);

  it("counts the hits of each message in any case, with and without marks", () => {
    expect(find("tides")).toEqual(["a0", "a1", "a2", "c0"]);
    expect(find("2**3")).toEqual(["c0"]);
  });
  it("takes the query as it is", () => {
    expect(find("(a.b)")).toEqual(["b0"]);
    expect(find("a.d")).toEqual([]);
    expect(find(" ")).toEqual([]);
  });
  it("is bounded", () => {
    expect(hitsIn([{ id: "a", content: "x".repeat(20_000) }], patternOf("x"))).toHaveLength(9999);
  });
});
