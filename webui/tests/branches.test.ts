import { describe, expect, it } from "vitest";
import { mapRows } from "../src/lib/branchmap";
import { diff } from "../src/lib/diff";
import { choose, fromMessages } from "../src/lib/tree";
import type { Message } from "../src/lib/types";
import { randomOf } from "./random";

const textOf = (before: string, after: string, kind: "old" | "new") =>
  diff(before, after)
    .filter((part) => part.kind === "same" || part.kind === kind)
    .map(({ text }) => text)
    .join("");

describe("the difference", () => {
  it("is by words, and by characters of Chinese", () => {
    expect(diff("The moon pulls", "The sun pulls")).toEqual([
      { kind: "same", text: "The " },
      { kind: "old", text: "moon" },
      { kind: "new", text: "sun" },
      { kind: "same", text: " pulls" },
    ]);
    expect(diff("月亮引起潮汐", "太阳引起潮汐").at(-1)).toEqual({ kind: "same", text: "引起潮汐" });
    expect(diff("", "")).toEqual([]);
    expect(diff("a", "a")).toEqual([{ kind: "same", text: "a" }]);
  });

  it.each([1, 2, 3, 4, 5, 6])("gives both texts back, with the fewest edits (seed %i)", (seed) => {
    const random = randomOf(seed);
    const made = () => Array.from({ length: random.int(30) }, () => random.pick(["a", "b", "c", "."]));
    for (let i = 0; i < 50; i++) {
      const [a, b] = [made(), made()];
      const [before, after] = [a.join(" "), b.join(" ")];
      expect(textOf(before, after, "old")).toBe(before);
      expect(textOf(before, after, "new")).toBe(after);
      const tokens = (text: string) => text.match(/\w|\s|\./g)?.length ?? 0;
      const edits = diff(before, after)
        .filter(({ kind }) => kind !== "same")
        .reduce((sum, { text }) => sum + tokens(text), 0);
      expect(edits).toBe(fewest(before, after));
    }
  });

  it("of long texts that have nothing in common is one replacement, and of long ones with common lines is by lines", () => {
    const words = (word: string, n: number) => Array.from({ length: n }, (_, i) => `${word}${i}`);
    const [before, after] = [words("a", 5000).join(" "), words("b", 5000).join(" ")];
    expect(diff(before, after).map(({ kind }) => kind)).toEqual(["old", "new"]);
    const [a, b] = [`${before}\nsame line\n${before}`, `${after}\nsame line\n${after}`];
    expect(diff(a, b)).toContainEqual({ kind: "same", text: "same line\n" });
  });
});

/** The length of the shortest edit script by the obvious table. */
function fewest(before: string, after: string): number {
  let row = Array.from({ length: after.length + 1 }, (_, i) => i);
  for (const [i, char] of [...before].entries()) {
    const next = [i + 1];
    for (const [j, other] of [...after].entries()) {
      next.push(char === other ? row[j]! : 1 + Math.min(row[j + 1]!, next[j]!));
    }
    row = next;
  }
  return row[after.length]!;
}

describe("the branch map", () => {
  const message = (id: string, parent: string | null, createdMs: number): Message => ({
    id,
    parent,
    role: "user",
    content: id,
    createdMs,
  });
  const tree = fromMessages(
    [
      message("q", null, 1),
      message("a1", "q", 2),
      message("a2", "q", 3),
      message("x", "a1", 4),
      message("y", "a2", 5),
      message("z", "a2", 6),
    ],
    {},
  );
  const shown = (made = tree) =>
    mapRows(made).map(({ key, lane, isOnPath, version, versions }) =>
      [key, lane, isOnPath ? "path" : "", `${version}/${versions}`].join(" "),
    );

  it("has the path in the first lane, and other versions before the chosen one", () => {
    expect(shown()).toEqual([
      "q 0 path 1/1",
      "a1 1  1/2",
      "x 1  1/1",
      "a2 0 path 2/2",
      "y 1  1/2",
      "z 0 path 2/2",
    ]);
    expect(shown(choose(tree, "x"))).toEqual([
      "q 0 path 1/1",
      "a2 1  2/2",
      "y 2  1/2",
      "z 1  2/2",
      "a1 0 path 1/2",
      "x 0 path 1/1",
    ]);
  });

  it("draws a line to every message but the first", () => {
    for (const { key, above, fork } of mapRows(tree))
      expect([key, above !== fork]).toEqual([key, key !== "q"]);
  });
});
