import "fake-indexeddb/auto";
import { openDB } from "idb";
import { describe, expect, it } from "vitest";
import { Db } from "../src/lib/db";
import { newSession } from "../src/lib/transfer";
import type { Message } from "../src/lib/types";

const message = (id: string): Message => ({ id, parent: null, role: "user", content: id, createdMs: 0 });

describe("the browser's store", () => {
  it("keeps sessions and messages apart, and deletes them together", async () => {
    const db = await Db.open("one");
    const [a, b] = [newSession(1), newSession(2)];
    await db.putAll([
      { session: a, messages: [message("a1"), message("a2")] },
      { session: b, messages: [message("b1")] },
    ]);
    await db.putMessages(a.id, [{ ...message("a1"), content: "changed" }]);
    expect((await db.messages(a.id)).map(({ content }) => content)).toEqual(["changed", "a2"]);
    expect((await db.messages(a.id))[0]).not.toHaveProperty("session");
    await db.deleteSession(a.id);
    expect(await db.messages(a.id)).toEqual([]);
    expect(await db.sessions()).toEqual([b]);
    expect(await db.messages(b.id)).toHaveLength(1);
    await db.deleteMessages(["b1"]);
    expect(await db.messages(b.id)).toEqual([]);
  });

  it("gives all messages in batches", async () => {
    const db = await Db.open("many");
    const session = newSession(1);
    const messages = Array.from({ length: 1203 }, (_, i) => message(`m${i}`));
    await db.putAll([{ session, messages }]);
    const sizes: number[] = [];
    const seen = new Set<string>();
    for await (const batch of db.allMessages()) {
      sizes.push(batch.length);
      for (const { id } of batch) seen.add(id);
    }
    expect(sizes).toEqual([500, 500, 203]);
    expect(seen.size).toBe(1203);
  });

  it("keeps values, and its data when it is opened again", async () => {
    const first = await Db.open("again");
    await first.putValue("settings", { theme: "dark" });
    first.close();
    const second = await Db.open("again");
    expect(await second.value("settings")).toEqual({ theme: "dark" });
    expect(await second.value("none")).toBeUndefined();
  });

  it("refuses data of a newer page", async () => {
    (await openDB("newer", 99)).close();
    await expect(Db.open("newer")).rejects.toThrow();
  });
});
