import { describe, expect, it } from "vitest";
import {
  add,
  branches,
  choose,
  EMPTY,
  fromMessages,
  path,
  pathTo,
  remove,
  update,
  type Tree,
} from "../src/lib/tree";
import type { Message } from "../src/lib/types";
import { randomOf } from "./random";

const message = (id: string, parent: string | null, createdMs = 0): Message => ({
  id,
  parent,
  role: "user",
  content: id,
  createdMs,
});
const ids = (messages: readonly Message[]) => messages.map(({ id }) => id).join(" ");

/** a - b - c, and d beside b. */
function sample(): Tree {
  return [message("a", null), message("b", "a"), message("c", "b"), message("d", "a")].reduce(add, EMPTY);
}

describe("a conversation's tree", () => {
  it("follows what was added last", () => {
    expect(ids(path(sample()))).toBe("a d");
  });

  it("keeps branches, and walks them", () => {
    const tree = choose(sample(), "c");
    expect(ids(path(tree))).toBe("a b c");
    expect(branches(tree, tree.messages.get("b")!)).toEqual({ ids: ["b", "d"], index: 0 });
    expect(ids(pathTo(tree, "d"))).toBe("a d");
  });

  it("changes nothing in place", () => {
    const tree = sample();
    const changed = update(tree, "d", { content: "new" });
    expect(tree.messages.get("d")!.content).toBe("d");
    expect(changed.messages.get("d")!.content).toBe("new");
    expect(changed.messages.get("c")).toBe(tree.messages.get("c"));
    expect(update(tree, "none", { content: "x" })).toBe(tree);
  });

  it("removes a message with all that follows it, and goes to the neighbor", () => {
    const { tree, removed } = remove(choose(sample(), "c"), "b");
    expect(ids(removed)).toBe("b c");
    expect(ids(path(tree))).toBe("a d");
    expect(remove(tree, "none").removed).toEqual([]);
  });

  it("leaves out what hangs on nothing, and circles", () => {
    const read = fromMessages(
      [message("x", "y"), message("y", "x"), message("a", null), message("lost", "gone"), message("b", "a")],
      { "": "nonsense" },
    );
    expect(ids([...read.messages.values()])).toBe("a b");
    expect(ids(path(read))).toBe("a b");
  });

  it.each([1, 2, 3, 4, 5])("agrees with what is stored after any work (seed %i)", (seed) => {
    const random = randomOf(seed);
    let tree = EMPTY;
    for (let i = 0; i < 300; i++) {
      const known = [...tree.messages.keys()];
      const any = known.length > 0 ? random.pick(known) : null;
      const action = random.int(10);
      if (action < 6 || any === null) tree = add(tree, message(`m${i}`, random.int(8) === 0 ? null : any, i));
      else if (action < 8) tree = choose(tree, any);
      else if (action < 9) tree = remove(tree, any).tree;
      else tree = update(tree, any, { content: `changed ${i}` });
      const read = fromMessages([...tree.messages.values()], tree.chosen);
      expect(ids(path(read))).toBe(ids(path(tree)));
      expect(read.children).toEqual(tree.children);
      for (const [i, one] of path(tree).entries()) expect(one.parent).toBe(path(tree)[i - 1]?.id ?? null);
    }
  });
});
