// The only file that talks HTTP to the model's API. Errors carry the server's own words.

import { events } from "./sse";
import type { RequestTimeline } from "./lanes";
import type { SpanKind, Timeline } from "./timeline";
import type { Candidate, Token } from "./tokens";
import type { Failure, Params, ToolCall, Usage } from "./types";

/** A completion waits at most this long for its timeline. */
const TIMELINE_MS = 2000;

/** An answer that is not a 200, or an error frame inside a stream. `status` 0: there was no answer at all. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string,
    readonly retryAfterS: number | null = null,
  ) {
    super(message);
  }

  failure(nowMs: number): Failure {
    const retryAtMs = this.retryAfterS === null ? null : nowMs + this.retryAfterS * 1000;
    return { status: this.status, code: this.code, message: this.message, retryAtMs };
  }
}

export interface Model {
  id: string;
  /** Tokens of prompt and answer together; null if the server does not say. */
  maxModelLen: number | null;
  /** Sampling parameters that the model sets where a request does not; empty if the server does not say. */
  defaults: Params;
  /** How its weights are stored: "BF16", "Q4_K_M"; "" if the server does not say. */
  format: string;
  /** When the server was started, since 1970: its cache was empty then. */
  startedMs: number;
}

/** A tool call comes in pieces: `index` tells which call a piece belongs to. */
export interface ToolPiece {
  index: number;
  id?: string;
  name?: string;
  arguments?: string;
}

/** One step of an answer. */
export type Piece =
  | { kind: "text"; text: string }
  | { kind: "reasoning"; text: string }
  | { kind: "tool"; tool: ToolPiece }
  | { kind: "finish"; reason: string }
  | { kind: "usage"; usage: Usage }
  | { kind: "id"; id: string }
  | { kind: "tokens"; tokens: Token[] }
  /** A whole tool call. */
  | { kind: "call"; call: ToolCall }
  /** What came up to here ends with this event of a background response. */
  | { kind: "at"; sequence: number }
  /** What came so far comes once more. */
  | { kind: "restart" };

/** What the server serves. `storesResponses`: it can generate answers in the background. */
export interface Served {
  models: Model[];
  storesResponses: boolean;
}

/** The served models; the first is the default. Throws ApiError. */
export async function listModels(key: string): Promise<Served> {
  const [answer, formats] = await Promise.all([call("/v1/models", key, {}), weightFormats(key)]);
  const list = (await answer.json()) as { data: Card[]; stores_responses?: boolean };
  const models = list.data.map((card) => ({
    id: card.id,
    maxModelLen: card.max_model_len ?? null,
    defaults: card.default_sampling_params ?? {},
    format: formats.get(card.id) ?? "",
    startedMs: 1000 * (card.created ?? 0),
  }));
  return { models, storesResponses: list.stores_responses === true };
}

/** The weight formats of the served models by name, from Ollama's list; empty without it. */
async function weightFormats(key: string): Promise<ReadonlyMap<string, string>> {
  try {
    const answer = await call("/api/tags", key, {});
    const list = (await answer.json()) as {
      models: { name: string; details: { quantization_level: string } }[];
    };
    return new Map(list.models.map(({ name, details }) => [name, details.quantization_level]));
  } catch {
    return new Map();
  }
}

interface Card {
  id: string;
  created?: number;
  max_model_len?: number | null;
  default_sampling_params?: Params;
}

/** The text of /metrics. Throws ApiError. */
export async function fetchMetrics(key: string): Promise<string> {
  return (await call("/metrics", key, {})).text();
}

/**
 * Streams one answer. `body` is a chat request without the fields of the stream, which are set here. Throws ApiError,
 * or what `signal` says when it stops the stream.
 */
export async function* streamChat(
  body: Record<string, unknown>,
  key: string,
  signal: AbortSignal,
): AsyncGenerator<Piece> {
  const streamed = {
    ...body,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  const answer = await post("/v1/chat/completions", streamed, key, signal);
  let named = false;
  try {
    for await (const data of events(answer.body!)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data) as Chunk;
      if (chunk.id && !named) yield { kind: "id", id: chunk.id };
      named ||= Boolean(chunk.id);
      yield* pieces(chunk, answer.status);
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
  }
  throw new ApiError("The connection ended before the answer did.", 0, "connection_lost");
}

interface Chunk {
  id?: string;
  error?: { message: string; code?: string };
  choices?: {
    delta?: {
      content?: string | null;
      reasoning_content?: string | null;
      reasoning?: string | null;
      tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
    };
    logprobs?: { content?: (WireCandidate & { top_logprobs?: WireCandidate[] })[] | null } | null;
    finish_reason?: string | null;
  }[];
  usage?: {
    prompt_tokens: number;
    completion_tokens: number;
    prompt_tokens_details?: { cached_tokens?: number } | null;
  } | null;
}

export interface WireCandidate {
  token: string;
  logprob: number;
  bytes: number[] | null;
}

export function candidate({ token, logprob, bytes }: WireCandidate): Candidate {
  return { text: token, logprob, isPart: bytes === null };
}

function* pieces(chunk: Chunk, status: number): Generator<Piece> {
  if (chunk.error) {
    const code = chunk.error.code ?? "error";
    // A stream's status went out before the error; the code tells what it would have been.
    throw new ApiError(chunk.error.message, code === "request_timeout" ? 408 : status, code);
  }
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  const scored = choice?.logprobs?.content ?? [];
  if (scored.length > 0) {
    const tokens = scored.map((each) => ({
      ...candidate(each),
      top: (each.top_logprobs ?? []).map(candidate),
    }));
    yield { kind: "tokens", tokens };
  }
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) yield { kind: "reasoning", text: reasoning };
  if (delta.content) yield { kind: "text", text: delta.content };
  for (const call of delta.tool_calls ?? []) {
    yield { kind: "tool", tool: { index: call.index, id: call.id, ...call.function } };
  }
  if (chunk.usage) {
    const usage = {
      promptTokens: chunk.usage.prompt_tokens,
      cachedTokens: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
      completionTokens: chunk.usage.completion_tokens,
    };
    yield { kind: "usage", usage };
  }
  if (choice?.finish_reason) yield { kind: "finish", reason: choice.finish_reason };
}

/** The number of tokens of a `prompt` or of a chat's `messages`. Throws ApiError. */
export async function countTokens(
  body: Record<string, unknown>,
  key: string,
  signal?: AbortSignal,
): Promise<number> {
  const answer = await post("/tokenize", body, key, signal);
  return ((await answer.json()) as { count: number }).count;
}

/**
 * The tokens of a prompt, each with its `top` likeliest candidates. The server computes the whole prompt for them, what
 * is cached too. Throws ApiError.
 */
export async function scorePrompt(body: Record<string, unknown>, top: number, key: string): Promise<Token[]> {
  const asked = { ...body, prompt_logprobs: top, max_tokens: 1, return_token_ids: true };
  const answer = await post("/v1/chat/completions", asked, key);
  const { prompt_token_ids: ids, prompt_logprobs: scored } = (await answer.json()) as ScoredPrompt;
  return ids.map((id, i) => {
    const all = Object.entries(scored[i] ?? {}).map(([other, { logprob, decoded_token: text }]) => ({
      id: Number(other),
      candidate: { text, logprob, isPart: text.includes("\ufffd") },
    }));
    all.sort((a, b) => b.candidate.logprob - a.candidate.logprob);
    const chosen = all.find((one) => one.id === id)?.candidate;
    const unknown = { text: "", logprob: 0, isPart: false };
    return { ...(chosen ?? unknown), top: all.slice(0, top).map((one) => one.candidate) };
  });
}

interface ScoredPrompt {
  prompt_token_ids: number[];
  /** One for each token, by token id; null for the first. */
  prompt_logprobs: (Record<string, { logprob: number; decoded_token: string }> | null)[];
}

/** What the time of a request was spent on, up to now; null if the server does not know it. */
export async function fetchTimeline(id: string, key: string): Promise<Timeline | null> {
  try {
    const signal = AbortSignal.timeout(TIMELINE_MS);
    const answer = await call(`/v1/requests/${encodeURIComponent(id)}/timeline`, key, { signal });
    const { choices } = (await answer.json()) as { choices: WireTimeline[] };
    return choices[0] ? timelineOf(choices[0]) : null;
  } catch {
    return null;
  }
}

/** The newest requests of this key that are open or ended in the last `lastS` seconds, newest first. Throws ApiError. */
export async function listRequests(
  lastS: number,
  limit: number,
  key: string,
): Promise<{ nowMs: number; requests: RequestTimeline[] }> {
  const answer = await call(`/v1/requests?last_s=${lastS}&limit=${limit}`, key, {});
  const { now, data } = (await answer.json()) as {
    now: number;
    data: { id: string; choices: WireTimeline[] }[];
  };
  const requests = data.map(({ id, choices }) => ({ id, timeline: timelineOf(choices[0]!) }));
  return { nowMs: 1000 * now, requests };
}

interface WireTimeline {
  arrived_at: number;
  is_over: boolean;
  total_s: number;
  seconds: Partial<Record<SpanKind, number>>;
  num_draft_tokens: number;
  num_accepted_tokens: number;
  spans: { kind: SpanKind; start_s: number; end_s: number; by: string[] }[];
}

function timelineOf(wire: WireTimeline): Timeline {
  const sums = Object.entries(wire.seconds).map(([kind, seconds]) => [kind, 1000 * seconds]);
  return {
    arrivedMs: 1000 * wire.arrived_at,
    totalMs: 1000 * wire.total_s,
    isOver: wire.is_over,
    spans: wire.spans.map(({ kind, start_s, end_s, by }) => ({
      kind,
      startMs: 1000 * start_s,
      endMs: 1000 * end_s,
      by,
    })),
    sums: Object.fromEntries(sums) as Timeline["sums"],
    draftTokens: wire.num_draft_tokens,
    acceptedTokens: wire.num_accepted_tokens,
  };
}

export function post(path: string, body: unknown, key: string, signal?: AbortSignal): Promise<Response> {
  const headers = { "content-type": "application/json" };
  return call(path, key, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** One HTTP exchange with the key, if there is one. `path` begins with a slash and is relative to the page, which a
 * proxy may serve below a path. Throws ApiError unless the status is a 2xx. */
export async function call(path: string, key: string, options: RequestInit): Promise<Response> {
  const headers = new Headers(options.headers);
  if (key) headers.set("authorization", `Bearer ${key}`);
  let answer: Response;
  try {
    answer = await fetch(`.${path}`, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached.", 0, "unreachable");
  }
  if (answer.ok) return answer;
  const body = (await answer.json().catch(() => null)) as {
    error?: { message?: string; code?: string };
  } | null;
  const message = body?.error?.message ?? `HTTP ${answer.status} ${answer.statusText}`;
  const seconds = Number(answer.headers.get("retry-after") ?? NaN);
  const retryAfterS = Number.isFinite(seconds) && seconds >= 0 ? seconds : null;
  throw new ApiError(message, answer.status, body?.error?.code ?? "error", retryAfterS);
}
