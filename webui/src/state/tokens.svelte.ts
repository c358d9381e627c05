// The token view of chats: which of them show it, and the tokens of their answers. Probabilities are requested only for
// answers of chats that show it. They are in memory only, a bounded number of them: what is missing, such as after a
// reload, is computed when the reader asks for it.

import { SvelteMap } from "svelte/reactivity";
import { ApiError, scorePrompt, type Piece } from "../lib/api";
import { alignEnd, textBefore, TokenAligner, type Unit } from "../lib/tokens";
import type { Message } from "../lib/types";
import { server } from "./server.svelte";
import { t, ui } from "./ui.svelte";

/** Candidates that are requested for each token. */
const TOP = 5;
const UNITS_MAX = 32_768;
/** A longer prompt is not computed again for its probabilities: the answer would hold up the page. */
const PROMPT_TOKENS_MAX = 8_192;

interface Scored {
  units: readonly Unit[];
  /** Length of their text. */
  length: number;
}

/** Follows the stream of one answer. */
export interface Recorder {
  seen(piece: Piece): void;
  /** Shows what was seen; called once a frame, and at the end. */
  draw(isOver: boolean): void;
}

class TokenView {
  #chats = $state.raw<ReadonlySet<string>>(new Set());
  /** The message whose tokens are being computed. */
  computing = $state<string | null>(null);
  /** By message; the oldest go first. */
  readonly #scored = new SvelteMap<string, Scored>();

  isOn(chat: string): boolean {
    return this.#chats.has(chat);
  }

  toggle(chat: string): void {
    const chats = new Set(this.#chats);
    if (!chats.delete(chat)) chats.add(chat);
    this.#chats = chats;
  }

  /** What a request of this chat asks for in addition. */
  fields(chat: string): Record<string, unknown> {
    return this.isOn(chat) ? { logprobs: true, top_logprobs: TOP } : {};
  }

  /** The units of an answer's text; null if they are not known. Those of a growing text may be a little behind. */
  units(message: Message, isRunning: boolean): readonly Unit[] | null {
    const scored = this.#scored.get(message.id);
    if (!scored) return null;
    const isCurrent = isRunning || scored.length === message.content.length;
    return isCurrent ? scored.units : null;
  }

  keep(id: string, units: readonly Unit[]): void {
    this.#scored.delete(id);
    this.#scored.set(id, { units, length: textBefore(units, units.length).length });
    let total = [...this.#scored.values()].reduce((sum, { units: { length } }) => sum + length, 0);
    for (const [oldest, { units: dropped }] of this.#scored) {
      if (total <= UNITS_MAX || oldest === id) break;
      this.#scored.delete(oldest);
      total -= dropped.length;
    }
  }

  /** Null if the chat does not show its tokens, or the answer goes on inside its reasoning. */
  recorder(chat: string, answer: Message): Recorder | null {
    if (!this.isOn(chat) || (answer.content === "" && answer.reasoning)) return null;
    let aligner = new TokenAligner();
    const unknown = (text: string) => (text === "" ? [] : [{ text, logprob: null, top: [] }]);
    const before = this.units(answer, false) ?? unknown(answer.content);
    let units = before;
    let made: Unit[] = [];
    return {
      seen: (piece) => {
        if (piece.kind === "restart") {
          aligner = new TokenAligner();
          units = answer.run ? unknown(answer.content.slice(0, answer.run.content)) : before;
          made = [];
        } else if (piece.kind === "tokens") made.push(...aligner.push(piece.tokens, ""));
        else if (piece.kind === "text") made.push(...aligner.push([], piece.text));
      },
      draw: (isOver) => {
        if (isOver) made.push(...aligner.end());
        if (made.length === 0) return;
        units = [...units, ...made];
        made = [];
        this.keep(answer.id, units);
      },
    };
  }

  /** Asks the server for the tokens of an answer that has none. `body`: the request that would continue it. */
  async compute(answer: Message, body: Record<string, unknown>): Promise<void> {
    const { promptTokens = 0, completionTokens = 0 } = answer.usage ?? {};
    if (promptTokens + completionTokens > PROMPT_TOKENS_MAX) {
      ui.toast(t("tokens_too_long", { n: PROMPT_TOKENS_MAX }));
      return;
    }
    this.computing = answer.id;
    try {
      this.keep(answer.id, alignEnd(await scorePrompt(body, TOP, server.key), answer.content));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      server.noticed(error);
      ui.toast(t("tokens_failed", { message: error.message }));
    } finally {
      this.computing = null;
    }
  }
}

export const tokenView = new TokenView();
