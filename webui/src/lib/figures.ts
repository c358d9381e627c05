import type { Message, Timing, Usage } from "./types";

/** The figures of an answer; null is not known. */
export interface Figures {
  prompt: number | null;
  cached: number;
  completion: number | null;
  firstTokenS: number | null;
  tokensPerS: number | null;
  /** Draft tokens and accepted ones; 0 without speculative decoding. */
  drafts: number;
  accepted: number;
}

/** A number of tokens in a short form: 512, 8k, 128k. */
export function shortTokens(n: number): string {
  return n < 1024 ? String(n) : `${Math.round(n / 1024)}k`;
}

/** Tokens per second are those after the first, over the time after the first: how fast one reads them appear. */
export function figures(message: Message): Figures {
  const { usage, timing } = message;
  const restS = timing ? (timing.totalMs - timing.firstTokenMs) / 1000 : 0;
  const rest = (usage?.completionTokens ?? 0) - 1;
  return {
    prompt: usage?.promptTokens ?? null,
    cached: usage?.cachedTokens ?? 0,
    completion: usage?.completionTokens ?? null,
    firstTokenS: timing ? timing.firstTokenMs / 1000 : null,
    tokensPerS: rest > 0 && restS > 0 ? rest / restS : null,
    drafts: usage?.draftTokens ?? 0,
    accepted: usage?.acceptedTokens ?? 0,
  };
}

/**
 * The usage of an answer that was continued: `piece` is that of the last request, whose prompt held the answer so far.
 */
export function continuedUsage(before: Usage | undefined, piece: Usage): Usage {
  if (before === undefined) return piece;
  const promptTokens = Math.max(0, piece.promptTokens - before.completionTokens);
  const draftTokens = (before.draftTokens ?? 0) + (piece.draftTokens ?? 0);
  return {
    promptTokens,
    cachedTokens: Math.min(before.cachedTokens, promptTokens),
    completionTokens: before.completionTokens + piece.completionTokens,
    ...(draftTokens > 0
      ? { draftTokens, acceptedTokens: (before.acceptedTokens ?? 0) + (piece.acceptedTokens ?? 0) }
      : {}),
  };
}

/** The times of an answer that was continued. The wait before the first token of `piece` is left out. */
export function continuedTiming(before: Timing | undefined, piece: Timing): Timing {
  if (before === undefined) return piece;
  const reasoningMs = (before.reasoningMs ?? 0) + (piece.reasoningMs ?? 0);
  return {
    firstTokenMs: before.firstTokenMs,
    totalMs: before.totalMs + piece.totalMs - piece.firstTokenMs,
    ...(reasoningMs > 0 ? { reasoningMs } : {}),
  };
}
