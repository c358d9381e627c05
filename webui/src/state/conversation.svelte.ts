// One open conversation: its tree, its answer in the making, and everything that a reader can do to it.

import { contextNumbers, dropOldest, sent, wireMessages } from "../lib/context";
import { figures } from "../lib/figures";
import { newId } from "../lib/id";
import { chatFields } from "../lib/request";
import { splitReasoning, unclosed } from "../lib/reasoning";
import { titleOf } from "../lib/title";
import { textBefore, type Unit } from "../lib/tokens";
import * as trees from "../lib/tree";
import type { Attachment, ChatSettings, Message, Session } from "../lib/types";
import { background } from "./background";
import { Generation, isCutInReasoning, type Sink } from "./generation";
import type { Library } from "./library.svelte";
import { settings } from "./look.svelte";
import { queues } from "./queues.svelte";
import { noteRequest } from "./requests";
import { server } from "./server.svelte";
import { titleByModel } from "./titles";
import { tokenView } from "./tokens.svelte";
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
    this.resume();
  }

  /** Goes on reading the newest answer that the server generates in the background, if there is one. */
  resume(): void {
    if (this.running) return;
    const open = [...this.tree.messages.values()].filter(({ end, run }) => end === "running" && run);
    const message = open.sort((a, b) => a.createdMs - b.createdMs).at(-1);
    if (!message) return background.end(this.id);
    const generation = new Generation(message);
    this.#read(message, generation, (sink) => generation.resume(message.run!, background, sink));
  }

  get session(): Session | undefined {
    return this.library.get(this.id);
  }

  get settings(): ChatSettings {
    return this.session?.settings ?? settings.kept.chat;
  }

  /** A new question at the end of the path. */
  send(text: string, attachments: readonly Attachment[] = []): void {
    const parent = this.path.at(-1)?.id ?? null;
    const files = attachments.length > 0 ? { attachments: [...attachments] } : {};
    const question = this.#add({ role: "user", content: text, parent, ...files });
    this.#titleBy(question);
    this.#answer(question.id);
  }

  /** Puts a question and its answer, which were made elsewhere, on the path. */
  adopt(question: Message, answer: Message): void {
    const { messages } = this.tree;
    const isKnown = question.parent === null || messages.has(question.parent);
    this.#add({ ...question, parent: isKnown ? question.parent : (this.path.at(-1)?.id ?? null) });
    this.#titleBy(question);
    this.#add({ ...answer, parent: question.id });
  }

  /** The first question names the chat, unless the user has. */
  #titleBy({ content, attachments, parent }: Message): void {
    if (!this.session || this.session.renamed || parent !== null) return;
    this.library.change(this.id, { title: titleOf(content || (attachments?.[0]?.name ?? "")) });
  }

  /**
   * Asks again: the same answer if nothing came, else a further branch next to it. `other`: settings of this request that
   * are not the chat's.
   */
  regenerate(answer: Message, other: Partial<ChatSettings> = {}): void {
    if (!answer.content && !answer.reasoning && !answer.toolCalls) {
      const empty = {
        failure: undefined,
        usage: undefined,
        timing: undefined,
        timeUse: undefined,
        createdMs: Date.now(),
      };
      this.#generate({ ...answer, ...empty }, empty, other);
    } else {
      this.#answer(answer.parent, other);
    }
  }

  beginEdit(message: Message): void {
    this.edit = { id: message.id, text: message.content };
  }

  /** A question's other wording is a branch next to it, with an answer of its own. */
  editQuestion(question: Message, text: string): void {
    const { parent, attachments } = question;
    const edited = this.#add({
      role: "user",
      content: text,
      parent,
      ...(attachments ? { attachments } : {}),
    });
    this.#titleBy(edited);
    this.#answer(edited.id);
  }

  /** The reader's version of an answer is a branch next to it. */
  editAnswer(answer: Message, text: string): void {
    this.#add({ role: "assistant", content: text, parent: answer.parent, end: "edited" });
  }

  /** Goes on where an answer was cut. */
  continueAnswer(answer: Message): void {
    this.#generate(answer, { failure: undefined });
  }

  /** The results of an answer's tool calls, one for each; the model goes on with them. */
  answerTools(answer: Message, results: readonly string[]): void {
    let parent = answer.id;
    answer.toolCalls?.forEach(({ id: toolCallId }, i) => {
      parent = this.#add({ role: "tool", content: results[i] ?? "", toolCallId, parent }).id;
    });
    this.#answer(parent);
  }

  /** A version of an answer that begins with these tokens and is continued by the model. */
  branchAt(answer: Message, units: readonly Unit[]): void {
    const { parent, reasoning } = answer;
    const content = textBefore(units, units.length);
    const made = this.#add({ role: "assistant", content, reasoning, parent, end: "running" });
    tokenView.keep(made.id, units);
    this.#generate(made, {});
  }

  /** Asks for the tokens of an answer that was generated without the token view. */
  computeTokens(answer: Message): void {
    const { model, messages } = this.#request(answer, this.settings, answer.model);
    const body = { model, messages, add_generation_prompt: false, continue_final_message: true };
    void tokenView.compute(answer, body);
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
      this.resume(); // an answer in the background has ended meanwhile
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

  /** Leaves the oldest turns out of what is sent next, which has this many tokens. */
  makeRoom(tokens: number, limit: number): void {
    const from = dropOldest(this.path, this.session?.contextFrom ?? null, tokens, limit);
    if (from === null) ui.toast(t("nothing_to_drop"));
    else this.library.change(this.id, { contextFrom: from });
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

  #answer(question: string | null, other: Partial<ChatSettings> = {}): void {
    this.#generate(
      this.#add({ role: "assistant", content: "", parent: question, end: "running" }),
      {},
      other,
    );
  }

  /** Streams into a message; text that it has already is continued. */
  #generate(message: Message, fields: Partial<Message>, other: Partial<ChatSettings> = {}): void {
    this.stop();
    const chat = { ...this.settings, ...other };
    const model = server.model(chat.model)?.id;
    this.tree = trees.update(this.tree, message.id, {
      ...fields,
      model,
      effort: chat.effort,
      end: "running",
      run: undefined,
    });
    const generation = new Generation({ ...message, run: undefined });
    const body = this.#request(message, chat, model);
    this.#read(message, generation, (sink) =>
      background.isOn
        ? generation.runInBackground(body, background, sink)
        : generation.run(body, server.key, sink),
    );
  }

  /** Reads an answer into its message until it ends. */
  #read(message: Message, generation: Generation, run: (sink: Sink) => Promise<void>): void {
    this.running = generation;
    this.library.keep(this);
    const recorder = tokenView.recorder(this.id, generation.start);
    const sink: Sink = {
      seen: (piece) => {
        if (piece.kind === "id") noteRequest(piece.id, this.id);
        recorder?.seen(piece);
      },
      draw: (changed) => {
        recorder?.draw(changed.end !== "running");
        this.tree = trees.update(this.tree, message.id, changed);
      },
      save: (changed: Partial<Message>) => {
        const now = this.tree.messages.get(message.id);
        if (now && this.session) void this.library.db?.putMessages(this.id, [{ ...now, ...changed }]);
        if (changed.run) background.begin(this.id);
      },
      failed: server.noticed.bind(server),
    };
    void run(sink).finally(() => {
      if (this.running !== generation) return;
      this.running = null;
      background.end(this.id);
      this.#ended(message.id, generation.isShared);
    });
  }

  #request(answer: Message, chat: ChatSettings, model: string | undefined): Record<string, unknown> {
    const before = answer.parent === null ? [] : trees.pathTo(this.tree, answer.parent);
    const isInReasoning = isCutInReasoning(answer);
    const isContinued = answer.content !== "" || isInReasoning;
    const soFar = isInReasoning
      ? { ...answer, content: unclosed(answer.reasoning ?? ""), reasoning: undefined }
      : answer;
    const all = isContinued ? [...before, soFar] : before;
    return {
      ...chatFields(chat),
      ...(model ? { model } : {}),
      messages: wireMessages(chat, sent(all, this.session?.contextFrom ?? null)),
      ...tokenView.fields(this.id),
      ...(isContinued ? { add_generation_prompt: false, continue_final_message: true } : {}),
    };
  }

  #ended(id: string, isShared: boolean): void {
    const message = this.tree.messages.get(id);
    this.library.ended(this);
    if (!message) return;
    const { tokensPerS } = figures(message);
    if (message.model && tokensPerS !== null) server.setSpeed(message.model, tokensPerS);
    const answer = splitReasoning(message.content, message.reasoning).answer;
    const said = message.failure ? message.failure.message : answer.slice(0, 300);
    ui.announce(`${t(message.end === "error" ? "announce_failed" : "announce_done")} ${said}`);
    void titleByModel(this, message);
    void queues.answered(this, message, isShared);
  }
}
