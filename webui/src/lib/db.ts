// The browser's store: IndexedDB with a versioned schema. Sessions and messages are separate records, so that a piece
// of an answer is one small write and the list of sessions is read without their texts.

import { openDB, type DBSchema, type IDBPDatabase } from "idb";
import type { Message, Session } from "./types";

export const NAME = "llaisys";
const VERSION = 1;

export type Stored = Message & { session: string };

interface Schema extends DBSchema {
  sessions: { key: string; value: Session };
  messages: { key: string; value: Stored; indexes: { session: string } };
  values: { key: string; value: unknown };
}

// One entry for each version: what it changed. An upgrade runs those that the browser's copy lacks, in order.
const MIGRATIONS: readonly ((db: IDBPDatabase<Schema>) => void)[] = [
  (db) => {
    db.createObjectStore("sessions", { keyPath: "id" });
    db.createObjectStore("messages", { keyPath: "id" }).createIndex("session", "session");
    db.createObjectStore("values");
  },
];

const BATCH = 500;

export class Db {
  readonly #db: IDBPDatabase<Schema>;

  private constructor(db: IDBPDatabase<Schema>) {
    this.#db = db;
  }

  /** Rejects where the browser keeps nothing (some private windows) or holds a newer version's data. */
  static async open(name = NAME): Promise<Db> {
    const db = await openDB<Schema>(name, VERSION, {
      upgrade(made, oldVersion) {
        for (const migrate of MIGRATIONS.slice(oldVersion)) migrate(made);
      },
      // Another tab has a newer page: let go of the store, so that its upgrade is not held up.
      blocking: () => db.close(),
    });
    return new Db(db);
  }

  sessions(): Promise<Session[]> {
    return this.#db.getAll("sessions");
  }

  async messages(session: string): Promise<Message[]> {
    const stored = await this.#db.getAllFromIndex("messages", "session", session);
    return stored.map(({ session: _, ...message }) => message);
  }

  async putSession(session: Session): Promise<void> {
    await this.#db.put("sessions", session);
  }

  async putMessages(session: string, messages: readonly Message[]): Promise<void> {
    const writing = this.#db.transaction("messages", "readwrite");
    for (const message of messages) void writing.store.put({ ...message, session });
    writing.commit(); // now, not after the puts have answered: a page that goes loses nothing
    await writing.done;
  }

  async deleteMessages(ids: readonly string[]): Promise<void> {
    const writing = this.#db.transaction("messages", "readwrite");
    for (const id of ids) void writing.store.delete(id);
    await writing.done;
  }

  /** The session and its messages, in one transaction. */
  async deleteSession(id: string): Promise<void> {
    const writing = this.#db.transaction(["sessions", "messages"], "readwrite");
    void writing.objectStore("sessions").delete(id);
    const messages = writing.objectStore("messages");
    for (const key of await messages.index("session").getAllKeys(id)) void messages.delete(key);
    await writing.done;
  }

  /** Whole sessions, all or none of them. */
  async putAll(sessions: readonly { session: Session; messages: readonly Message[] }[]): Promise<void> {
    const writing = this.#db.transaction(["sessions", "messages"], "readwrite");
    for (const { session, messages } of sessions) {
      void writing.objectStore("sessions").put(session);
      for (const message of messages) {
        void writing.objectStore("messages").put({ ...message, session: session.id });
      }
    }
    await writing.done;
  }

  /** Every message, in batches, so that a search neither holds all texts nor blocks the page. */
  async *allMessages(): AsyncGenerator<Stored[]> {
    let after: IDBKeyRange | null = null;
    for (;;) {
      const batch: Stored[] = await this.#db.getAll("messages", after, BATCH);
      if (batch.length > 0) yield batch;
      if (batch.length < BATCH) return;
      after = IDBKeyRange.lowerBound(batch.at(-1)!.id, true);
    }
  }

  async value<T>(key: string): Promise<T | undefined> {
    return (await this.#db.get("values", key)) as T | undefined;
  }

  async putValue(key: string, value: unknown): Promise<void> {
    await this.#db.put("values", value, key);
  }

  /** Replaces a value by what `change` makes of it, in one transaction, so that two pages never change the same value. */
  async changeValue<T>(key: string, change: (value: T | undefined) => T): Promise<void> {
    const writing = this.#db.transaction("values", "readwrite");
    void writing.store.put(change((await writing.store.get(key)) as T | undefined), key);
    await writing.done;
  }

  async deleteValue(key: string): Promise<void> {
    await this.#db.delete("values", key);
  }

  close(): void {
    this.#db.close();
  }
}
