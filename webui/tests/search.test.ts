import { describe, expect, it } from "vitest";
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
