// All sessions: the list, which is always in memory, and the conversations that are open or being answered.

import { addressOf, replaceAddress, visit } from "../lib/address";
import { newId } from "../lib/id";
import { Db } from "../lib/db";
import { matches, snippet, words, type Snippet } from "../lib/search";
import { cleanTitle, titleOf } from "../lib/title";
import { newSession, type Whole } from "../lib/transfer";
import * as trees from "../lib/tree";
import type { Attachment, ChatSettings, Message, Session } from "../lib/types";
import type { Place } from "../lib/window";
import { Conversation } from "./conversation.svelte";
import { t, ui } from "./ui.svelte";

export interface Hit {
  session: Session;
  /** Null: the title has the words. */
  messageId: string | null;
  snippet: Snippet | null;
}

const HITS_MAX = 200;

export class Library {
  db: Db | null = null;
  sessions = $state.raw<ReadonlyMap<string, Session>>(new Map());
  /** Conversations in memory: the current one and those that are being answered. */
  open = $state.raw<ReadonlyMap<string, Conversation>>(new Map());
  current = $state.raw<Conversation | null>(null);
  /** Sessions whose answer ended while another one was being read. */
  unread = $state.raw<ReadonlySet<string>>(new Set());
  /** What stands in the composer of a chat that does not exist yet. */
  newDraft = $state("");
  /** The settings of a chat that does not exist yet. */
  newSettings = $state.raw<ChatSettings | null>(null);
  /** Told of what changes here, to carry it elsewhere. */
  onChange: (id: string) => void = () => {};
  onDelete: (id: string) => void = () => {};
  /** The message to bring into view after opening. */
  target = $state<string | null>(null);
  /** Where each chat was left; absent: at its end. */
  readonly places = new Map<string, Place>();
  /** Saves what stands in the composer. */
  saveDraft: () => void = () => {};
  /** A chat that an address names and this browser does not have: the server may. */
  #awaited: string | null = null;
  #isAllKnown = false;
  #nShown = 0;

  async load(db: Db | null): Promise<void> {
    this.db = db;
    this.sessions = new Map((await db?.sessions())?.map((session) => [session.id, session]));
    this.newDraft = (await db?.value<string>("draft")) ?? "";
  }

  get(id: string): Session | undefined {
    return this.sessions.get(id);
  }

  /** Shows a session; null is the place for a new one. The newest call counts. */
  async show(id: string | null, target: string | null = null): Promise<void> {
    const n = ++this.#nShown;
    const conversation = id === null ? null : await this.#opened(id);
    if (n !== this.#nShown) return;
    this.current = conversation;
    this.target = target;
    const kept = [...this.open.values()].filter((other) => other === conversation || other.running);
    this.open = new Map(kept.map((other) => [other.id, other]));
    if (conversation) this.unread = new Set([...this.unread].filter((other) => other !== conversation.id));
    this.#awaited = conversation ? null : id;
    visit(addressOf(id));
    if (this.#isAllKnown) this.allKnown();
  }

  /** Every chat of the server is here, or the server keeps none: an awaited chat does not exist. */
  allKnown(): void {
    this.#isAllKnown = true;
    if (this.#awaited === null) return;
    this.#awaited = null;
    replaceAddress(addressOf(null));
    ui.toast(t("chat_missing"));
  }

  /** Shows the place for a new chat after the current one is gone, whose address leads nowhere. */
  #leave(): Promise<void> {
    replaceAddress(addressOf(null));
    return this.show(null);
  }

  async #opened(id: string): Promise<Conversation | null> {
    const session = this.sessions.get(id);
    if (!session) return null;
    const known = this.open.get(id);
    if (known) return known;
    const made = new Conversation(this, id, (await this.db?.messages(id)) ?? [], session.chosen);
    this.keep(made);
    made.resume();
    return made;
  }

  /** Goes on reading the answers of these chats that the server generates in the background. */
  async resume(ids: readonly string[]): Promise<void> {
    for (const id of ids) await this.#opened(id);
  }

  /** A question that begins a session, or goes on with the current one. */
  send(text: string, attachments: readonly Attachment[] = []): void {
    (this.current ?? this.#begin()).send(text, attachments);
  }

  #begin(): Conversation {
    const session = newSession(Date.now(), { settings: this.newSettings });
    this.#put(session);
    const made = new Conversation(this, session.id, [], {});
    this.keep(made);
    this.current = made;
    this.newSettings = null;
    this.#awaited = null;
    replaceAddress(addressOf(session.id));
    return made;
  }

  /** Adds a question and its answer, asked with these settings, to a chat, or to a new one (null), and shows it. */
  async adopt(
    chat: Conversation | null,
    asked: ChatSettings,
    question: Message,
    answer: Message,
  ): Promise<void> {
    await this.show(chat?.id ?? null);
    const conversation = this.current ?? this.#begin();
    if (JSON.stringify(asked) !== JSON.stringify(conversation.settings)) {
      this.change(conversation.id, { settings: asked });
    }
    conversation.adopt(question, answer);
  }

  change(id: string, fields: Partial<Session>): void {
    const session = this.sessions.get(id);
    if (session) this.#put({ ...session, ...fields, changedMs: Date.now() });
  }

  rename(id: string, title: string): void {
    const clean = cleanTitle(title);
    if (clean) this.change(id, { title: clean, renamed: true });
  }

  /** Into a folder; "" is none. */
  move(id: string, folder: string): void {
    this.change(id, { folder: cleanTitle(folder) });
  }

  /** Takes a session away; the toast brings them back. */
  async delete(id: string): Promise<void> {
    const session = this.sessions.get(id);
    if (!session) return;
    const whole = await this.whole(session);
    this.open.get(id)?.stop();
    if (this.current?.id === id) await this.#leave();
    const rest = new Map(this.sessions);
    rest.delete(id);
    this.sessions = rest;
    this.open = new Map([...this.open].filter(([other]) => other !== id));
    await this.db?.deleteSession(id);
    this.onDelete(id);
    const undo = () => void this.add([whole]);
    ui.toast(t("chat_deleted", { title: session.title || t("new_chat") }), { label: t("undo"), run: undo });
  }

  /** A session of its own with the messages from the first to this one. */
  async fork(from: Conversation, message: Message): Promise<void> {
    const path = trees.pathTo(from.tree, message.id);
    // A title that follows the first message may be that of another branch.
    const ofPath = from.session?.renamed ? "" : titleOf(path[0]?.content ?? "");
    const title = cleanTitle(t("fork_of", { title: ofPath || (from.session?.title ?? "") }));
    const session = newSession(Date.now(), {
      title,
      renamed: true,
      folder: from.session?.folder ?? "",
      settings: from.session?.settings ?? null,
    });
    const ids = new Map([["", null as string | null]]);
    const messages = path.map((old) => {
      const id = newId();
      ids.set(old.id, id);
      return { ...old, id, parent: ids.get(old.parent ?? "") ?? null };
    });
    session.contextFrom = ids.get(from.session?.contextFrom ?? "") ?? null;
    await this.add([{ session, messages }]);
    await this.show(session.id);
  }

  /** Whole sessions from a file or an undo. */
  async add(wholes: readonly Whole[]): Promise<void> {
    const all = new Map(this.sessions);
    for (const { session } of wholes) all.set(session.id, session);
    this.sessions = all;
    await this.db?.putAll(wholes);
    for (const { session } of wholes) this.onChange(session.id);
    if (this.db) return;
    for (const { session, messages } of wholes) {
      this.keep(new Conversation(this, session.id, messages, session.chosen));
    }
  }

  /** A copy from elsewhere in place of what is here. */
  async replace(whole: Whole): Promise<void> {
    const { messages } = whole;
    const known = this.get(whole.session.id);
    const session = { ...whole.session, draft: known?.draft ?? "" };
    const kept = new Set(messages.map(({ id }) => id));
    const gone = known ? (await this.whole(known)).messages.filter(({ id }) => !kept.has(id)) : [];
    this.sessions = new Map(this.sessions).set(session.id, session);
    this.open.get(session.id)?.replace(messages, session.chosen);
    await this.db?.deleteMessages(gone.map(({ id }) => id));
    await this.db?.putAll([{ session, messages }]);
    if (session.id === this.#awaited) await this.show(session.id);
  }

  /** Deleted elsewhere. What was being written in it moves to the place for a new chat. */
  async drop(id: string): Promise<void> {
    this.saveDraft();
    const written = [this.get(id)?.draft, this.open.get(id)?.edit?.text].filter((text) => text?.trim());
    this.sessions = new Map([...this.sessions].filter(([other]) => other !== id));
    if (written.length > 0) {
      this.setDraft(null, [this.newDraft, ...written].filter(Boolean).join("\n\n"));
      ui.toast(t("draft_moved"));
    }
    if (this.current?.id === id) await this.#leave();
    await this.db?.deleteSession(id);
  }

  async whole(session: Session): Promise<Whole> {
    const open = this.open.get(session.id);
    const messages = open ? [...open.tree.messages.values()] : ((await this.db?.messages(session.id)) ?? []);
    return { session, messages };
  }

  /** Sessions with all words in their title, then messages with all of them, as they are found. */
  async *search(query: string): AsyncGenerator<Hit[]> {
    const wanted = words(query);
    if (wanted.length === 0) return;
    const titled = [...this.sessions.values()].filter(({ title, folder }) =>
      matches([title, folder], wanted),
    );
    titled.sort((a, b) => b.updatedMs - a.updatedMs);
    yield titled.slice(0, HITS_MAX).map((session) => ({ session, messageId: null, snippet: null }));
    if (!this.db) return;
    for await (const batch of this.db.allMessages()) {
      const hits: Hit[] = [];
      for (const { session: id, id: messageId, content } of batch) {
        const session = this.sessions.get(id);
        if (!session || !matches([content], wanted)) continue;
        hits.push({ session, messageId, snippet: snippet(content, wanted) });
      }
      yield hits;
    }
  }

  keep(conversation: Conversation): void {
    this.open = new Map(this.open).set(conversation.id, conversation);
  }

  ended(conversation: Conversation): void {
    this.onChange(conversation.id);
    if (this.current === conversation) return;
    this.unread = new Set(this.unread).add(conversation.id);
  }

  setDraft(id: string | null, draft: string): void {
    const session = id === null ? undefined : this.sessions.get(id);
    if (session) {
      this.sessions = new Map(this.sessions).set(session.id, { ...session, draft });
      void this.db?.putSession({ ...session, draft });
    }
    if (id !== null) return;
    this.newDraft = draft;
    void this.db?.putValue("draft", draft);
  }

  #put(session: Session): void {
    this.sessions = new Map(this.sessions).set(session.id, session);
    void this.db?.putSession(session);
    this.onChange(session.id);
  }
}

export const library = new Library();
