// Answers that the server generates in the background: which chats have one, so that a page that is loaded goes on reading
// it, and how a page waits for a server that does not answer.

import type { ApiError } from "../lib/api";
import type { Db } from "../lib/db";
import type { Link } from "../lib/responses";
import { pause } from "../lib/task";
import { settings } from "./look.svelte";
import { server } from "./server.svelte";

const KEY = "background";
const RETRY_MS = 500;
const RETRY_MAX_MS = 8000;
const READY_MS = 250;

class Background implements Link {
  #chats = new Set<string>();
  #db: Db | null = null;

  /** The chats with an answer that was not read to its end, of those that the browser still has. */
  async load(db: Db | null, has: (chat: string) => boolean): Promise<readonly string[]> {
    this.#db = db;
    this.#chats = new Set((await db?.value<string[]>(KEY))?.filter(has));
    return [...this.#chats];
  }

  /** New answers do not end with their page. */
  get isOn(): boolean {
    return settings.kept.background && server.storesResponses;
  }

  begin(chat: string): void {
    if (this.#chats.has(chat)) return;
    this.#chats.add(chat);
    void this.#db?.putValue(KEY, [...this.#chats]);
  }

  end(chat: string): void {
    if (this.#chats.delete(chat)) void this.#db?.putValue(KEY, [...this.#chats]);
  }

  key(): string {
    return server.key;
  }

  async retry(error: ApiError, n: number, signal: AbortSignal): Promise<void> {
    server.noticed(error);
    await pause(Math.min(RETRY_MS * 2 ** n, RETRY_MAX_MS), signal);
    while (server.status !== "ready") await pause(READY_MS, signal);
  }
}

export const background = new Background();
