// How full the model's context is before a request is sent.

import type { Message } from "./types";

export interface Fill {
  limit: number;
  /** Tokens of the request: those that the server has computed before, and the others. */
  cached: number;
  fresh: number;
  /** What is left for the answer; 0 if the request does not fit. */
  free: number;
  state: "fits" | "tight" | "over";
}

// Less than this share of the context is little for an answer.
const ROOM_LEAST = 0.1;

/**
 * `computed`: how many of the request's first tokens were computed before. `maxTokens`: the setting for answers; null
 * without one.
 */
export function fillOf(limit: number, tokens: number, computed: number, maxTokens: number | null): Fill {
  const cached = Math.min(computed, tokens);
  const free = Math.max(0, limit - tokens);
  const wanted = Math.min(maxTokens ?? Infinity, ROOM_LEAST * limit);
  const state = free === 0 ? "over" : free < wanted ? "tight" : "fits";
  return { limit, cached, fresh: tokens - cached, free, state };
}

/**
 * The tokens that the server computed for the newest answer of these messages: its prompt and what it became, except
 * reasoning, which templates leave out of later prompts. 0 if the server was started after that.
 */
export function computedTokens(messages: readonly Message[], startedMs: number): number {
  const last = messages.findLast(({ role, usage }) => role === "assistant" && usage);
  if (!last?.usage || last.createdMs < startedMs) return 0;
  const { promptTokens, completionTokens } = last.usage;
  return last.reasoning ? promptTokens : promptTokens + completionTokens;
}
