import { describe, expect, it } from "vitest";
import { mistakeIn } from "../src/lib/jsonplace";
import { randomOf } from "./random";

describe("the place of a mistake", () => {
  it.each([
    ["", 1, 1],
    ["{", 1, 2],
    ['{"a" 1}', 1, 6],
    ['{"a": 1,\n "b" 2}', 2, 6],
    ['{"a": 1\n  "b": 2}', 2, 3],
    ['{"a": }', 1, 7],
    ['{"a": 1,}', 1, 9],
    ["{'a': 1}", 1, 2],
    ["[1, 2", 1, 6],
    ["[1 2]", 1, 4],
    ["[,]", 1, 2],
    ["[}", 1, 2],
    ["{}\n{}", 2, 1],
    ["nul", 1, 1],
    ["[01]", 1, 3],
    ['["a\nb"]', 1, 2],
  ])("in %j is line %i, column %i", (text, line, column) => {
    expect(mistakeIn(text)).toEqual({ line, column });
  });

  it("is none in JSON, and where JSON is broken off in what is left of it", () => {
    const random = randomOf(7);
    const value = (depth: number): unknown => {
      const kind = random.int(depth > 0 ? 6 : 4);
      if (kind === 0) return random.pick([null, true, false]);
      if (kind === 1) return (random.int(2000) - 1000) / 8;
      if (kind <= 3) return 'a"\\\n é'.slice(random.int(7));
      const items = Array.from({ length: random.int(4) }, () => value(depth - 1));
      return kind === 4 ? items : Object.fromEntries(items.map((item, i) => [`k${i}`, item]));
    };
    for (let n = 0; n < 200; n++) {
      const text = JSON.stringify([value(4)]);
      expect(mistakeIn(text)).toBeNull();
      expect(mistakeIn(text.slice(0, -1))).toEqual({ line: 1, column: text.length });
    }
  });
});
