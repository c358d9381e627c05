// Keeps the sessions of this browser and of the server's chat store the same. The browser's store comes first: a page
// works without the server, and what changed meanwhile is carried over when it is back.

import { ApiError } from "../lib/api";
import { changes, read, write, type Change } from "../lib/chats";
import type { Db } from "../lib/db";
import { merge } from "../lib/merge";
import { fromDocument, toDocument, type Whole } from "../lib/transfer";
import type { Library } from "./library.svelte";
import { server } from "./server.svelte";

const KEY = "sync";
const SOON_MS = 1000;
const POLL_MS = 10_000;

interface Kept {
  /** The server's file that the rest is about. */
  store: string;
  /** The last revision that was looked at. */
  seen: number;
  /** Where each session of this browser was when it was read or written. */
  revisions: Record<string, number>;
  /** Sessions that changed here since, deleted ones too. */
  dirty: string[];
}

export class Sync {
  #kept: Kept = { store: "", seen: 0, revisions: {}, dirty: [] };
  #timer: ReturnType<typeof setTimeout> | undefined;
  #isBusy = false;

  constructor(
    private readonly db: Db,
    private readonly library: Library,
  ) {}

  /** Begins if the server keeps chats; waits while it cannot be reached or wants a key. */
  async start(): Promise<void> {
    this.#kept = (await this.db.value<Kept>(KEY)) ?? this.#kept;
    const mark = (id: string) => {
      if (!this.#kept.dirty.includes(id)) this.#kept.dirty.push(id);
      this.#in(SOON_MS);
    };
    this.library.onChange = mark;
    this.library.onDelete = mark;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.#in(0);
    });
    await this.#turn();
  }

  #in(ms: number): void {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => void this.#turn(), ms);
  }

  /** Takes what is new there, brings what is new here. */
  async #turn(): Promise<void> {
    if (this.#isBusy) return;
    if (server.status !== "ready") {
      this.#in(SOON_MS);
      return;
    }
    this.#isBusy = true;
    let waitMs = POLL_MS;
    try {
      const keepsChats = await this.#pull();
      this.library.allKnown();
      if (!keepsChats) {
        this.library.onChange = this.library.onDelete = () => {};
        return;
      }
      for (const id of [...this.#kept.dirty]) await this.#push(id);
      if (this.#kept.dirty.length > 0) waitMs = SOON_MS;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      // A server that cannot be reached is back soon; a full disk or a used-up rate takes its time.
      waitMs = error.status === 0 ? SOON_MS : Math.max(SOON_MS, (error.retryAfterS ?? POLL_MS / 1000) * 1000);
    } finally {
      this.#isBusy = false;
      await this.db.putValue(KEY, this.#kept);
    }
    this.#in(waitMs);
  }

  /** False if this server keeps no chats. */
  async #pull(): Promise<boolean> {
    for (;;) {
      const page = await changes(server.key, this.#kept.seen);
      if (page.store === null) return false;
      if (page.store !== this.#kept.store) {
        // Another file: everything here is new to it.
        this.#kept = { store: page.store, seen: 0, revisions: {}, dirty: [...this.library.sessions.keys()] };
        continue;
      }
      for (const change of page.data) await this.#take(change);
      if (!page.has_more) return true;
    }
  }

  async #take(change: Change): Promise<void> {
    const { id, revision, deleted } = change;
    if (this.#kept.revisions[id] !== revision) {
      const isDirty = this.#kept.dirty.includes(id);
      if (deleted) {
        // A session that changed here after it was deleted there lives on.
        if (!isDirty) await this.library.drop(id);
      } else await this.#fetch(id);
      if (deleted) this.#kept.revisions[id] = revision;
    }
    this.#kept.seen = revision;
  }

  /** The server's copy into this browser, merged with what changed here. */
  async #fetch(id: string): Promise<void> {
    const found = await read(server.key, id);
    const theirs = found && fromDocument(id, found.chat);
    if (!found || !theirs) return;
    this.#kept.revisions[id] = found.revision;
    const session = this.library.get(id);
    const isDirty = this.#kept.dirty.includes(id);
    if (isDirty && !session) return; // deleted here: that is still to be told
    const isOpen = this.library.open.get(id)?.running != null;
    const mine: Whole | null = session && (isDirty || isOpen) ? await this.library.whole(session) : null;
    await this.library.replace(mine ? merge(mine, theirs) : theirs);
  }

  /** This browser's copy to the server; an answer in the making waits for its end, or until others can read it. */
  async #push(id: string): Promise<void> {
    const running = this.library.open.get(id)?.running;
    if (running && !running.isShared) return;
    const session = this.library.get(id);
    const base = this.#kept.revisions[id] ?? 0;
    const document = session ? toDocument(await this.library.whole(session)) : null;
    this.#kept.dirty = this.#kept.dirty.filter((other) => other !== id);
    if (document === null && base === 0) return; // never was there
    try {
      const revision = await write(server.key, id, base, document);
      if (revision !== null) this.#kept.revisions[id] = revision;
      else {
        // It changed there: look at everything again, which merges it, and write in the next turn.
        this.#kept.dirty.push(id);
        delete this.#kept.revisions[id];
        this.#kept.seen = 0;
      }
    } catch (error) {
      // A chat that the server will never take (too large, say) stays in this browser only.
      const isFinal = error instanceof ApiError && error.status >= 400 && error.status < 500;
      if (!isFinal || error.status === 401 || error.status === 429) {
        this.#kept.dirty.push(id);
        throw error;
      }
    }
  }
}
