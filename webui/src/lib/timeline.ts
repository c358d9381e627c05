// What the time of a request was spent on, from the server's timeline.

export const KINDS = [
  "queued",
  "own_chunk",
  "other_chunk",
  "decode",
  "preempted",
  "kv_wait",
  "remote_kv",
  "slow_reader",
  "folded",
] as const;
export type SpanKind = (typeof KINDS)[number];

export interface Span {
  kind: SpanKind;
  startMs: number;
  endMs: number;
  /** The requests that caused it: `other` is one of another key. */
  by: readonly string[];
}

export interface Timeline {
  /** Since 1970. */
  arrivedMs: number;
  totalMs: number;
  isOver: boolean;
  spans: readonly Span[];
  /** Milliseconds by kind, those of folded spans too. */
  sums: Partial<Record<SpanKind, number>>;
  draftTokens: number;
  acceptedTokens: number;
}

/** A stretch of an answer's bar. */
export interface Stretch {
  kind: SpanKind;
  ms: number;
}

/** What an answer keeps of its timelines. */
export interface TimeUse {
  stretches: Stretch[];
  sums: Partial<Record<SpanKind, number>>;
  /** By kind: what caused it, as `causes` names them. */
  by: Partial<Record<SpanKind, string[]>>;
}

/** Of the bar of one request: what is shorter than this share of it belongs to the stretch before. */
const SHARE_LEAST = 1 / 80;
const STRETCHES_MAX = 160;
const CAUSES_MAX = 4;

/** The bar of a timeline. `nameOf`: what is kept of the id of a request. */
export function timeUse(timeline: Timeline, nameOf: (id: string) => string): TimeUse {
  const stretches: Stretch[] = [];
  const by: TimeUse["by"] = {};
  for (const span of timeline.spans) {
    const ms = span.endMs - span.startMs;
    for (const name of span.by.map(nameOf)) {
      const names = (by[span.kind] ??= []);
      if (!names.includes(name) && names.length < CAUSES_MAX) names.push(name);
    }
    const last = stretches.at(-1);
    if (last && (last.kind === span.kind || ms < SHARE_LEAST * timeline.totalMs)) last.ms += ms;
    else stretches.push({ kind: span.kind, ms });
  }
  return { stretches, sums: timeline.sums, by };
}

/** When the first token came, in milliseconds after the request: after the last chunk of its prompt before any decoding. */
export function firstTokenOf({ spans, totalMs }: Timeline): number {
  const isDecoding = ({ kind }: Span) => kind === "decode" || kind === "other_chunk";
  return spans.find(isDecoding)?.startMs ?? totalMs;
}

/** The bar of an answer that was continued; the time between its requests is not in it. */
export function continuedTimeUse(before: TimeUse | undefined, piece: TimeUse): TimeUse {
  if (before === undefined) return piece;
  const sums = { ...before.sums };
  const by = { ...before.by };
  for (const kind of KINDS) {
    const ms = (sums[kind] ?? 0) + (piece.sums[kind] ?? 0);
    if (ms > 0) sums[kind] = ms;
    const names = [...new Set([...(by[kind] ?? []), ...(piece.by[kind] ?? [])])];
    if (names.length > 0) by[kind] = names.slice(0, CAUSES_MAX);
  }
  return { stretches: [...before.stretches, ...piece.stretches].slice(-STRETCHES_MAX), sums, by };
}

/** The kinds with time in them, longest first. */
export function kindsOf({ sums }: TimeUse): { kind: SpanKind; ms: number }[] {
  const all = KINDS.map((kind) => ({ kind, ms: sums[kind] ?? 0 })).filter(({ ms }) => ms > 0);
  return all.sort((a, b) => b.ms - a.ms);
}

/** A stored bar, each field of the right type; null if it is none. */
export function readTimeUse(value: unknown): TimeUse | null {
  const { stretches, sums, by } = (value ?? {}) as Record<string, unknown>;
  if (!Array.isArray(stretches) || typeof sums !== "object" || sums === null) return null;
  const isKind = (kind: unknown): kind is SpanKind => KINDS.includes(kind as SpanKind);
  const isTime = (ms: unknown): ms is number => typeof ms === "number" && Number.isFinite(ms) && ms >= 0;
  const read: TimeUse = { stretches: [], sums: {}, by: {} };
  for (const one of stretches.slice(0, STRETCHES_MAX) as (Partial<Stretch> | null)[]) {
    if (isKind(one?.kind) && isTime(one.ms)) read.stretches.push({ kind: one.kind, ms: one.ms });
  }
  for (const kind of KINDS) {
    const ms = (sums as Record<string, unknown>)[kind];
    if (isTime(ms)) read.sums[kind] = ms;
    const names = (by as Record<string, unknown> | null | undefined)?.[kind];
    if (!Array.isArray(names)) continue;
    read.by[kind] = names.filter((name) => typeof name === "string").slice(0, CAUSES_MAX);
  }
  return read;
}
