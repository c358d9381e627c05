import "fake-indexeddb/auto";
import { expect, it } from "vitest";
import { Db } from "../src/lib/db";
import { newSession } from "../src/lib/transfer";
import type { Message } from "../src/lib/types";

const { queues } = await import("../src/state/queues.svelte");
const answer: Message = { id: "a", parent: null, role: "assistant", content: "", createdMs: 1, end: "stop" };

/** A chat whose sent messages are noted. */
function chat(sent: string[]) {
  return { id: "c", session: newSession(1), send: (text: string) => void sent.push(text) };
}

it("sends a waiting message from one of the pages that read the answer", async () => {
  const db = await Db.open("queue");
  await queues.load(db, () => true);
  queues.add("c", "next", []);
  queues.add("c", "later", []);
  const both = queues.of("c");
  const sent: string[] = [];
  await queues.answered(chat(sent), answer, true);
  expect(sent).toEqual(["next"]);
  // Another page has read both from the store before.
  queues.waiting = new Map([["c", both]]);
  await queues.answered(chat(sent), answer, true);
  expect(sent).toEqual(["next"]);
  expect(queues.of("c").map(({ text }) => text)).toEqual(["later"]);
  await queues.answered(chat(sent), answer, true);
  expect(sent).toEqual(["next", "later"]);
});

it("holds the messages after an answer that was stopped", async () => {
  await queues.load(null, () => true);
  queues.add("c", "next", []);
  const sent: string[] = [];
  await queues.answered(chat(sent), { ...answer, end: "stopped" }, true);
  expect(sent).toEqual([]);
  await queues.answered(chat(sent), answer, true);
  expect(sent).toEqual(["next"]);
});
