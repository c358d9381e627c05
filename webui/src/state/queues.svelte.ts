// Messages that were written while an answer was still being made. Each is sent when the one before has its answer. An
// answer that fails or is stopped holds them until the user sends them on.

import { attachmentsOf } from "../lib/attachments";
import type { Db } from "../lib/db";
import { newId } from "../lib/id";
import type { Attachment, Message, Session } from "../lib/types";

export interface Queued {
  id: string;
  text: string;
  attachments: readonly Attachment[];
}

/** What of a conversation the queue needs. */
interface Sender {
  id: string;
  session: Session | undefined;
  send(text: string, attachments: readonly Attachment[]): void;
}

const KEY = "queue";
const NONE: readonly Queued[] = [];

class Queues {
  /** By chat, in order. */
  waiting = $state.raw<ReadonlyMap<string, readonly Queued[]>>(new Map());
  #db: Db | null = null;

  /** Reads what the browser keeps of the chats that it still has. */
  async load(db: Db | null, has: (chat: string) => boolean): Promise<void> {
    this.#db = db;
    const stored = (await db?.value<[string, Queued[]][]>(KEY)) ?? [];
    this.waiting = new Map(
      stored
        .filter(([chat]) => has(chat))
        .map(([chat, all]) => [
          chat,
          all.map((one) => ({ ...one, attachments: attachmentsOf(one.attachments) })),
        ]),
    );
  }

  of(chat: string): readonly Queued[] {
    return this.waiting.get(chat) ?? NONE;
  }

  add(chat: string, text: string, attachments: readonly Attachment[]): void {
    this.#set(chat, [...this.of(chat), { id: newId(), text, attachments }]);
  }

  edit(chat: string, id: string, text: string): void {
    this.#set(
      chat,
      this.of(chat).map((one) => (one.id === id ? { ...one, text } : one)),
    );
  }

  remove(chat: string, id: string): void {
    this.#set(
      chat,
      this.of(chat).filter((one) => one.id !== id),
    );
  }

  /** Sends the first one, if there is any. */
  sendNext(conversation: Sender): void {
    const [first, ...rest] = this.of(conversation.id);
    if (!first || !conversation.session) return;
    this.#set(conversation.id, rest);
    conversation.send(first.text, first.attachments);
  }

  /**
   * After an answer: one that is complete, or as long as allowed, is followed by the next message. `isShared`: other pages
   * have read the answer, too, and only the first of them sends.
   */
  async answered(conversation: Sender, { end }: Message, isShared: boolean): Promise<void> {
    const [first] = this.of(conversation.id);
    if (!first || (end !== "stop" && end !== "length")) return;
    if (!isShared || (await this.#claim(conversation.id, first.id))) this.sendNext(conversation);
    else this.remove(conversation.id, first.id);
  }

  /** Takes a message out of the browser's store; false if another page has done that. */
  async #claim(chat: string, id: string): Promise<boolean> {
    let isFirst = this.#db === null;
    await this.#db?.changeValue<[string, Queued[]][]>(KEY, (stored = []) => {
      isFirst = stored.some(([other, all]) => other === chat && all.some((one) => one.id === id));
      return stored.map(([other, all]) => [other, all.filter((one) => one.id !== id)]);
    });
    return isFirst;
  }

  #set(chat: string, queue: readonly Queued[]): void {
    const all = new Map(this.waiting);
    if (queue.length > 0) all.set(chat, queue);
    else all.delete(chat);
    this.waiting = all;
    void this.#db?.putValue(KEY, [...all]);
  }
}

export const queues = new Queues();
