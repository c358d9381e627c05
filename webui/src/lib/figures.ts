import type { Message } from "./types";

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

/** Tokens a second are those after the first, over the time after the first: how fast one reads them appear. */
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
