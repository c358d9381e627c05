// Counts the tokens of the request that is being written. Those of the conversation are counted when it changes, those
// of the draft while it is written.

import { ApiError, countTokens } from "../lib/api";
import { sent, wireMessages } from "../lib/context";
import { computedTokens, fillOf, type Fill } from "../lib/meter";
import { pathTo } from "../lib/tree";
import type { ChatSettings, Message } from "../lib/types";
import type { Conversation } from "./conversation.svelte";
import { server } from "./server.svelte";

/** Of a longer draft only this much is counted, and the rest estimated from it. */
const DRAFT_CHARS_MAX = 50_000;

/** What is to be counted: the messages before the draft, and the draft. Messages that are the same array are the same. */
export interface Question {
  messages: readonly Message[];
  from: string | null;
  settings: ChatSettings;
  draft: string;
  /** The draft is in place of a message that was computed with all that is before it. */
  isEdit: boolean;
}

export class Meter {
  fill = $state.raw<Fill | null>(null);
  #control = new AbortController();
  #base: { of: Question; tokens: number } | null = null;

  clear(): void {
    this.#control.abort();
    this.fill = null;
  }

  /** Counts; a newer call stops it. If the server does not count them, nothing is shown. */
  async count(asked: Question): Promise<void> {
    this.#control.abort();
    const { signal } = (this.#control = new AbortController());
    const model = server.model(asked.settings.model);
    if (!model?.maxModelLen) return this.clear();
    try {
      const base = await this.#baseOf(asked, model.id, signal);
      const tokens = base + (await draftTokens(asked.draft, model.id, signal));
      if (signal.aborted) return;
      const computed = asked.isEdit ? base : computedTokens(asked.messages, model.startedMs);
      const maxTokens = Number(asked.settings.params.max_tokens ?? NaN);
      this.fill = fillOf(model.maxModelLen, tokens, computed, Number.isNaN(maxTokens) ? null : maxTokens);
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      this.fill = null;
    }
  }

  /** The tokens of everything except the draft: what the template puts around it too. */
  async #baseOf(asked: Question, model: string, signal: AbortSignal): Promise<number> {
    const { messages, from, settings } = asked;
    const known = this.#base;
    if (known?.of.messages === messages && known.of.from === from && known.of.settings === settings) {
      return known.tokens;
    }
    const empty: Message = { id: "", parent: null, role: "user", content: "", createdMs: 0 };
    const wire = wireMessages(settings, [...sent(messages, from), empty]);
    const tokens = await countTokens({ model, messages: wire }, server.key, signal);
    this.#base = { of: asked, tokens };
    return tokens;
  }
}

async function draftTokens(draft: string, model: string, signal: AbortSignal): Promise<number> {
  if (draft === "") return 0;
  const prompt = draft.slice(0, DRAFT_CHARS_MAX);
  const tokens = await countTokens({ model, prompt, add_special_tokens: false }, server.key, signal);
  return Math.round((tokens * draft.length) / prompt.length);
}

/** What is before an edited message; the same array until the conversation changes. */
const before = new WeakMap<readonly Message[], Map<string, readonly Message[]>>();
export function messagesBefore(conversation: Conversation, id: string): readonly Message[] {
  const { path } = conversation;
  const known = before.get(path) ?? new Map<string, readonly Message[]>();
  before.set(path, known);
  const found = known.get(id) ?? pathTo(conversation.tree, id).slice(0, -1);
  known.set(id, found);
  return found;
}

export const meter = new Meter();
