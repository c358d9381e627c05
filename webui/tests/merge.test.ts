import { describe, expect, it } from "vitest";
import { merge } from "../src/lib/merge";
import { fromDocument, newSession, toDocument } from "../src/lib/transfer";
import type { Message } from "../src/lib/types";

const message = (id: string, content: string, end?: Message["end"]): Message => ({
  id,
  parent: null,
  role: "assistant",
  content,
  createdMs: 1,
  ...(end ? { end } : {}),
});
const whole = (changedMs: number, title: string, ...messages: Message[]) => ({
  session: { ...newSession(5), id: "s", changedMs, title },
  messages,
});

describe("two copies of a session", () => {
  it("give all messages, and the name of the later one, whichever comes first", () => {
    const a = whole(1, "old", message("x", "both"), message("y", "only a"));
    const b = whole(2, "new", message("x", "both"), message("z", "only b"));
    for (const merged of [merge(a, b), merge(b, a)]) {
      expect(merged.session.title).toBe("new");
      expect(merged.messages.map(({ content }) => content).sort()).toEqual(["both", "only a", "only b"]);
    }
  });

  it("keep the finished answer, else the longer one", () => {
    const open = whole(1, "", message("x", "a long piece of it", "running"));
    const done = whole(2, "", message("x", "whole", "stop"));
    const short = whole(3, "", message("x", "who", "stop"));
    for (const [a, b] of [
      [open, done],
      [done, open],
      [done, short],
      [short, done],
    ] as const) {
      expect(merge(a, b).messages[0]!.content).toBe("whole");
    }
  });
});

describe("the server's copy", () => {
  it("is the session as it was, but the draft", () => {
    const made = whole(7, "t", message("x", "text", "stop"));
    made.session.draft = "not sent";
    made.session.chosen = { "": "x" };
    made.session.contextFrom = "x";
    const read = fromDocument("s", JSON.parse(JSON.stringify(toDocument(made))));
    expect(read).toEqual({ ...made, session: { ...made.session, draft: "" } });
  });

  it("has what another browser needs to go on reading an answer", () => {
    const timing = { firstTokenMs: 1, totalMs: 2 };
    const run = { id: "resp_a", after: 3, content: 4, reasoning: 0, askedMs: 5, firstMs: 6, timing };
    const made = whole(7, "t", { ...message("x", "text", "running"), run });
    const copy = (): Record<string, unknown> => JSON.parse(JSON.stringify(toDocument(made)));
    expect(fromDocument("s", copy())!.messages[0]!.run).toEqual(run);
    for (const wrong of [{ id: "../../x" }, { content: "4" }, null]) {
      const broken = copy() as { messages: { run: unknown }[] };
      broken.messages[0]!.run = wrong && { ...run, ...wrong };
      expect(fromDocument("s", broken)!.messages[0]!.run).toBeUndefined();
    }
  });

  it("is refused if it is no session, or another one", () => {
    expect(fromDocument("s", null)).toBeNull();
    expect(fromDocument("s", { id: "s" })).toBeNull();
    expect(fromDocument("s", { id: "other", messages: [] })).toBeNull();
  });
});
