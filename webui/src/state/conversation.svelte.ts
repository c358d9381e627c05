// One open conversation: its tree, its answer in the making, and everything that a reader can do to it.

import { contextNumbers, dropOldest, sent, wireMessages } from "../lib/context";
import { newId } from "../lib/id";
import { splitReasoning } from "../lib/reasoning";
import { titleOf } from "../lib/title";
import * as trees from "../lib/tree";
import type { ChatSettings, Message, Session } from "../lib/types";
import { Generation } from "./generation";
import type { Library } from "./library.svelte";
import { settings } from "./look.svelte";
import { server } from "./server.svelte";
import { t, ui } from "./ui.svelte";

export class Conversation {
  tree = $state.raw(trees.EMPTY);
  running = $state.raw<Generation | null>(null);
  /** The message that is being edited and its text so far: here, because its row may scroll out of the page. */
  edit = $state<{ id: string; text: string } | null>(null);
  readonly path = $derived(trees.path(this.tree));

  constructor(
    private readonly library: Library,
    readonly id: string,
    messages: readonly Message[],
    chosen: Readonly<Record<string, string>>,
  ) {
    this.tree = trees.fromMessages(messages, chosen);
  }

  /** The messages as they are elsewhere. */
  replace(messages: readonly Message[], chosen: Readonly<Record<string, string>>): void {
    this.tree = trees.fromMessages(messages, chosen);
  }

  get session(): Session | undefined {
    return this.library.get(this.id);
  }

  get settings(): ChatSettings {
    return this.session?.settings ?? settings.kept.chat;
  }

  /** A new question at the end of the path. */
  send(text: string): void {
    const question = this.#add({ role: "user", content: text, parent: this.path.at(-1)?.id ?? null });
    if (this.session && !this.session.renamed && question.parent === null) {
      this.library.change(this.id, { title: titleOf(text) });
    }
    this.#answer(question.id);
  }

  /** Asks again: the same answer if nothing came, else a further branch beside it. */
  regenerate(answer: Message): void {
    if (!answer.content && !answer.reasoning && !answer.toolCalls) {
      this.#generate(answer, { failure: undefined, createdMs: Date.now() });
    } else {
      this.#answer(answer.parent);
    }
  }

  beginEdit(message: Message): void {
    this.edit = { id: message.id, text: message.content };
  }

  /** A question's other wording is a branch beside it, with an answer of its own. */
  editQuestion(question: Message, text: string): void {
    const edited = this.#add({ role: "user", content: text, parent: question.parent });
    if (this.session && !this.session.renamed && question.parent === null) {
      this.library.change(this.id, { title: titleOf(text) });
    }
    this.#answer(edited.id);
  }

  /** The reader's version of an answer is a branch beside it. */
  editAnswer(answer: Message, text: string): void {
    this.#add({ role: "assistant", content: text, parent: answer.parent, end: "edited" });
  }

  /** Goes on where an answer was cut. */
  continueAnswer(answer: Message): void {
    this.#generate(answer, { failure: undefined });
  }

  stop(): void {
    this.running?.stop();
  }

  choose(id: string): void {
    this.tree = trees.choose(this.tree, id);
    this.library.change(this.id, { chosen: { ...this.tree.chosen } });
  }

  /** Takes a message and what follows it out; the toast brings them back. */
  delete(message: Message): void {
    if (this.running) this.stop();
    const before = this.tree;
    const { tree, removed } = trees.remove(this.tree, message.id);
    this.tree = tree;
    void this.library.db?.deleteMessages(removed.map(({ id }) => id));
    this.library.change(this.id, { chosen: { ...tree.chosen } });
    const undo = () => {
      this.tree = before;
      void this.library.db?.putMessages(this.id, removed);
      this.library.change(this.id, { chosen: { ...before.chosen } });
    };
    ui.toast(t("message_deleted", { n: removed.length }), { label: t("undo"), run: undo });
  }

  /** Leaves the oldest turns out of what is sent, as many as the refusal's numbers ask for, and asks again. */
  dropOldest(answer: Message): void {
    const numbers = this.contextOf(answer);
    if (numbers === null || !this.session) return;
    const before = trees.pathTo(this.tree, answer.failure ? (answer.parent ?? "") : answer.id);
    const from = dropOldest(before, this.session.contextFrom, numbers.wanted, numbers.limit);
    if (from === null) {
      ui.toast(t("nothing_to_drop"));
      return;
    }
    this.library.change(this.id, { contextFrom: from });
    if (answer.failure) this.regenerate(answer);
    else this.continueAnswer(answer);
  }

  /** The context's size and what an answer asked for, if that is why it failed or was cut; else null. */
  contextOf(answer: Message): { limit: number; wanted: number } | null {
    if (answer.failure) {
      return answer.failure.code === "context_length_exceeded"
        ? contextNumbers(answer.failure.message)
        : null;
    }
    const limit = server.model(answer.model ?? "")?.maxModelLen;
    if (answer.end !== "length" || !answer.usage || !limit) return null;
    const wanted = answer.usage.promptTokens + answer.usage.completionTokens;
    return wanted >= limit ? { limit, wanted } : null;
  }

  #add(fields: Pick<Message, "role" | "content" | "parent"> & Partial<Message>): Message {
    const message: Message = { id: newId(), createdMs: Date.now(), ...fields };
    this.tree = trees.add(this.tree, message);
    this.library.change(this.id, { chosen: { ...this.tree.chosen }, updatedMs: message.createdMs });
    void this.library.db?.putMessages(this.id, [message]);
    return message;
  }

  #answer(question: string | null): void {
    this.#generate(this.#add({ role: "assistant", content: "", parent: question, end: "running" }), {});
  }

  /** Streams into a message; text that it has already is continued. */
  #generate(message: Message, fields: Partial<Message>): void {
    this.stop();
    const model = server.model(this.settings.model)?.id;
    this.tree = trees.update(this.tree, message.id, { ...fields, model, end: "running" });
    const generation = new Generation(message);
    this.running = generation;
    this.library.keep(this);
    const sink = {
      draw: (changed: Partial<Message>) => {
        this.tree = trees.update(this.tree, message.id, changed);
      },
      save: () => {
        const now = this.tree.messages.get(message.id);
        if (now && this.session) void this.library.db?.putMessages(this.id, [now]);
      },
      failed: server.noticed.bind(server),
    };
    const body = this.#request(message, model);
    void generation.run(body, server.key, sink).finally(() => {
      if (this.running !== generation) return;
      this.running = null;
      this.#ended(message.id);
    });
  }

  #request(answer: Message, model: string | undefined): Record<string, unknown> {
    const before = answer.parent === null ? [] : trees.pathTo(this.tree, answer.parent);
    const isContinued = answer.content !== "";
    const all = isContinued ? [...before, answer] : before;
    return {
      ...this.settings.params,
      ...(model ? { model } : {}),
      messages: wireMessages(this.settings, sent(all, this.session?.contextFrom ?? null)),
      ...(isContinued ? { add_generation_prompt: false, continue_final_message: true } : {}),
    };
  }

  #ended(id: string): void {
    const message = this.tree.messages.get(id);
    this.library.ended(this);
    if (!message) return;
    const answer = splitReasoning(message.content, message.reasoning).answer;
    const said = message.failure ? message.failure.message : answer.slice(0, 300);
    ui.announce(`${t(message.end === "error" ? "announce_failed" : "announce_done")} ${said}`);
  }
}
