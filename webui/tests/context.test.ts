import { describe, expect, it } from "vitest";
import { contextNumbers, dropOldest, sent, wireMessages } from "../src/lib/context";
import type { Message } from "../src/lib/types";

const chat = { model: "", system: "", params: {} };
const turns = (n: number, chars: number): Message[] =>
  Array.from({ length: n }, (_, i) => ({
    id: `m${i}`,
    parent: i ? `m${i - 1}` : null,
    role: i % 2 ? "assistant" : "user",
    content: "x".repeat(chars),
    createdMs: i,
  }));

describe("what is sent", () => {
  it("is the system prompt and the path, without empty answers", () => {
    const [question, answer] = turns(2, 3);
    const again = { ...question!, content: "again" };
    const empty = { ...answer!, content: "" };
    expect(wireMessages({ ...chat, system: "be brief" }, [question!, empty, again, answer!])).toEqual([
      { role: "system", content: "be brief" },
      { role: "user", content: "xxx\n\nagain" },
      { role: "assistant", content: "xxx" },
    ]);
  });

  it("begins at the first message that is not dropped", () => {
    const path = turns(4, 3);
    expect(sent(path, "m2").map(({ id }) => id)).toEqual(["m2", "m3"]);
    expect(sent(path, "elsewhere")).toHaveLength(4);
  });
});

describe("a context that is full", () => {
  it("is read from the server's words", () => {
    const words =
      "the context is 2048 tokens, and the request asks for 2114: 2113 in the prompt and 1 for the answer";
    expect(contextNumbers(words)).toEqual({ limit: 2048, wanted: 2114 });
    expect(contextNumbers("something else")).toBeNull();
  });

  it("loses its oldest turns until 60 % are left, and begins with a question", () => {
    const path = turns(21, 100);
    const from = dropOldest(path, null, 2100, 2048)!;
    const left = sent(path, from);
    expect(left[0]!.role).toBe("user");
    expect(left.length).toBeLessThanOrEqual(13);
    expect(left.length).toBeGreaterThanOrEqual(11);
    const further = dropOldest(path, from, 2100, 2048)!;
    expect(sent(path, further).length).toBeLessThan(left.length);
  });

  it("always loses a turn, and never the last question", () => {
    expect(dropOldest(turns(3, 100), null, 10, 2048)).toBe("m2");
    expect(dropOldest(turns(1, 100), null, 9999, 2048)).toBeNull();
    expect(dropOldest(turns(5, 1000), null, 999_999, 10)).toBe("m4");
  });
});
