// One question to several models or settings at once. The answers stay here, in memory, until one is kept as a branch of
// its chat.

import { sent, wireMessages } from "../lib/context";
import { newId } from "../lib/id";
import { chatFields } from "../lib/request";
import type { Attachment, ChatSettings, Message } from "../lib/types";
import { attachments } from "./attachments.svelte";
import type { Conversation } from "./conversation.svelte";
import { Generation } from "./generation";
import { library } from "./library.svelte";
import { settings } from "./look.svelte";
import { server } from "./server.svelte";
import { t, ui } from "./ui.svelte";

export const COLUMNS_MIN = 2;
export const COLUMNS_MAX = 4;

/** What one column asks, and its answer. */
export class Column {
  readonly id = newId();
  settings = $state.raw<ChatSettings>({ model: "", system: "", params: {} });
  answer = $state.raw<Message | null>(null);
  running = $state.raw<Generation | null>(null);

  constructor(chat: ChatSettings) {
    this.settings = chat;
  }

  /** Asks for an answer to these messages and waits for its end. */
  async ask(before: readonly Message[]): Promise<void> {
    const model = server.model(this.settings.model)?.id;
    const parent = before.at(-1)!.id;
    const empty: Message = { id: newId(), parent, role: "assistant", content: "", createdMs: Date.now() };
    const { effort } = this.settings;
    this.answer = { ...empty, ...(model ? { model } : {}), effort, end: "running" };
    const generation = new Generation(empty);
    this.running = generation;
    const body = {
      ...chatFields(this.settings),
      ...(model ? { model } : {}),
      messages: wireMessages(this.settings, before),
    };
    await generation.run(body, server.key, {
      seen: () => {},
      draw: (fields) => {
        if (this.running === generation && this.answer) this.answer = { ...this.answer, ...fields };
      },
      save: () => {},
      failed: server.noticed.bind(server),
    });
    if (this.running === generation) this.running = null;
  }

  /** Stops the answer; what came stays. */
  stop(): void {
    this.running?.stop();
  }
}

class Comparison {
  columns = $state.raw<readonly Column[]>([]);
  text = $state("");
  /** The question of the answers that are shown. */
  asked = $state.raw<Message | null>(null);
  readonly isRunning = $derived(this.columns.some(({ running }) => running !== null));
  /** The chat whose messages come before the question; null is a new one. */
  #chat = $state.raw<Conversation | null>(null);

  /** Begins with two columns; with the answers of before if they were asked in this chat. */
  begin(): void {
    if (this.columns.length > 0 && this.#chat === library.current) return;
    this.#drop();
    this.#chat = library.current;
    this.asked = null;
    const chat = this.#settings();
    const other = server.models.find(({ id }) => id !== server.model(chat.model)?.id);
    this.columns = [new Column(chat), new Column(other ? { ...chat, model: other.id } : chat)];
  }

  /** The chat has no whole answer yet to go on from. */
  get isChatBusy(): boolean {
    return (this.#chat?.running ?? null) !== null;
  }

  get files(): readonly Attachment[] {
    return attachments.of(this.#chat?.id ?? null);
  }

  #settings(): ChatSettings {
    return this.#chat?.settings ?? library.newSettings ?? settings.kept.chat;
  }

  add(): void {
    if (this.columns.length < COLUMNS_MAX) this.columns = [...this.columns, new Column(this.#settings())];
  }

  remove(column: Column): void {
    if (this.columns.length <= COLUMNS_MIN) return;
    column.stop();
    this.columns = this.columns.filter((other) => other !== column);
  }

  /** Asks every column at once. */
  async ask(): Promise<void> {
    this.#drop();
    const path = this.#chat?.path ?? [];
    const files = this.files;
    const question: Message = {
      id: newId(),
      parent: path.at(-1)?.id ?? null,
      role: "user",
      content: this.text,
      createdMs: Date.now(),
      ...(files.length > 0 ? { attachments: [...files] } : {}),
    };
    this.asked = question;
    const before = sent([...path, question], this.#chat?.session?.contextFrom ?? null);
    await Promise.all(this.columns.map((column) => column.ask(before)));
    if (this.asked === question) ui.announce(t("compare_done"));
  }

  stop(): void {
    for (const column of this.columns) column.stop();
  }

  /** Makes the answer of a column a branch of the chat, which goes on with the column's settings. */
  async keep(column: Column): Promise<void> {
    const { asked } = this;
    if (!asked || !column.answer) return;
    this.#drop();
    attachments.take(this.#chat?.id ?? null);
    await library.adopt(this.#chat, column.settings, asked, column.answer);
    this.text = "";
    this.columns = [];
  }

  /** Stops for good: what still comes is dropped. */
  #drop(): void {
    for (const column of this.columns) {
      column.stop();
      column.running = null;
    }
  }
}

export const comparison = new Comparison();
