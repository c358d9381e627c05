// The only file that talks HTTP to the model's API. Errors carry the server's own words.

import { events } from "./sse";
import type { Failure, Usage } from "./types";

/** A completion waits at most this long for its number of drafts. */
const DRAFTS_MS = 2000;

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
  | { kind: "id"; id: string };

/** The served models; the first is the default. Throws ApiError. */
export async function listModels(key: string): Promise<Model[]> {
  const answer = await call("/v1/models", key, {});
  const list = (await answer.json()) as { data: { id: string; max_model_len?: number | null }[] };
  return list.data.map((card) => ({ id: card.id, maxModelLen: card.max_model_len ?? null }));
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
  const answer = await call("/v1/chat/completions", key, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(streamed),
    signal,
  });
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
    finish_reason?: string | null;
  }[];
  usage?: {
    prompt_tokens: number;
    completion_tokens: number;
    prompt_tokens_details?: { cached_tokens?: number } | null;
  } | null;
}

function* pieces(chunk: Chunk, status: number): Generator<Piece> {
  if (chunk.error) {
    const code = chunk.error.code ?? "error";
    // A stream's status went out before the error; the code tells what it would have been.
    throw new ApiError(chunk.error.message, code === "request_timeout" ? 408 : status, code);
  }
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
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

/** The drafts of a completion (speculative decoding); null without any, or if the server does not know them. */
export async function fetchDrafts(
  id: string,
  key: string,
): Promise<{ draftTokens: number; acceptedTokens: number } | null> {
  try {
    const signal = AbortSignal.timeout(DRAFTS_MS);
    const answer = await call(`/v1/requests/${encodeURIComponent(id)}/timeline`, key, { signal });
    const timeline = (await answer.json()) as {
      choices: { num_draft_tokens?: number; num_accepted_tokens?: number }[];
    };
    const { num_draft_tokens: draftTokens = 0, num_accepted_tokens: acceptedTokens = 0 } =
      timeline.choices[0] ?? {};
    return draftTokens > 0 ? { draftTokens, acceptedTokens } : null;
  } catch {
    return null;
  }
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
