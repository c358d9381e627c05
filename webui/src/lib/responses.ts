// Background responses (/v1/responses): the server generates an answer without a connected page, and a page that was away
// goes on reading it after the last event that it has.

import { ApiError, call, candidate, post, type Piece, type WireCandidate } from "./api";
import type { WireMessage } from "./context";
import { newId } from "./id";
import { events } from "./sse";
import { pause } from "./task";

const LOGPROBS = "message.output_text.logprobs";
/** A response whose events the server no longer keeps is read this often until it is complete. */
const POLL_MS = 2000;

/** A name for a response that is about to be requested, and the id that the response will have. */
export function newResponse(): { requestId: string; id: string } {
  const requestId = newId();
  return { requestId, id: `resp_${requestId}` };
}

/** The body of a background response that asks what a chat request does. */
export function responseBody(chat: Record<string, unknown>, requestId: string): Record<string, unknown> {
  const { messages, max_tokens, response_format, tools, logprobs, top_logprobs, ...same } = chat as ChatBody;
  const schema = response_format?.json_schema;
  return {
    ...same,
    request_id: requestId,
    input: messages.flatMap(itemsOf),
    background: true,
    store: true,
    stream: true,
    ...(max_tokens === undefined ? {} : { max_output_tokens: max_tokens }),
    ...(schema ? { text: { format: { type: "json_schema", ...schema } } } : {}),
    ...(tools ? { tools: tools.map((tool) => ({ type: "function", ...tool.function })) } : {}),
    ...(logprobs ? { include: [LOGPROBS], top_logprobs } : {}),
  };
}

interface ChatBody extends Record<string, unknown> {
  messages: WireMessage[];
  max_tokens?: number;
  response_format?: { json_schema: Record<string, unknown> };
  tools?: { function: Record<string, unknown> }[];
  logprobs?: boolean;
  top_logprobs?: number;
}

function itemsOf(message: WireMessage): Record<string, unknown>[] {
  const { role, content, reasoning_content: reasoning, tool_calls: calls = [] } = message;
  if (role === "tool") {
    return [{ type: "function_call_output", call_id: message.tool_call_id, output: content }];
  }
  return [
    ...(reasoning
      ? [{ type: "reasoning", summary: [], content: [{ type: "reasoning_text", text: reasoning }] }]
      : []),
    ...(content === "" && calls.length > 0 ? [] : [{ type: "message", role, content }]),
    ...calls.map((each) => ({ type: "function_call", call_id: each.id, ...each.function })),
  ];
}

/** What the reader of a response needs of the page. */
export interface Link {
  key(): string;
  /** Resolves when the server is to be asked again after the failure number `n` in a row. Rejects when `signal` aborts. */
  retry(error: ApiError, n: number, signal: AbortSignal): Promise<void>;
}

/**
 * The pieces of a background response up to its end, over as many connections as it takes. `body` begins it; without one
 * it is followed after the event number `after` (null: from its first event). Throws ApiError, with the code
 * `response_gone` if the server does not know the response, or what `signal` says.
 */
export async function* streamResponse(
  { id, body = null, after = null }: { id: string; body?: unknown; after?: number | null },
  link: Link,
  signal: AbortSignal,
): AsyncGenerator<Piece> {
  yield { kind: "id", id };
  let hasBegun = body === null;
  let areEventsKept = true;
  let failures = 0;
  let last: Response | null = null;
  while (last === null) {
    signal.throwIfAborted();
    try {
      if (!areEventsKept) {
        const whole = await read(id, link.key(), signal);
        if (isOpen(whole)) await pause(POLL_MS, signal);
        else {
          yield* outputOf(whole);
          last = whole;
        }
        continue;
      }
      const query = after === null ? "" : `&starting_after=${after}`;
      const answer = hasBegun
        ? await call(`/v1/responses/${id}?stream=true${query}`, link.key(), { signal })
        : await post("/v1/responses", body, link.key(), signal);
      hasBegun = true;
      for await (const data of events(answer.body!)) {
        const event = JSON.parse(data) as Event;
        if (event.type === "error") break;
        failures = 0;
        after = event.sequence_number;
        yield* piecesOf(event);
        yield { kind: "at", sequence: after };
        if (LAST.includes(event.type)) last = event.response!;
      }
      areEventsKept = false; // unless this was the end
    } catch (error) {
      if (signal.aborted) throw error;
      const failure = error instanceof ApiError ? error : new ApiError("The connection broke.", 0, "broken");
      if (!hasBegun) throw failure;
      if (failure.code === "events_dropped") areEventsKept = false;
      else if (failure.status === 404) throw new ApiError(failure.message, 404, "response_gone");
      else if (isTemporary(failure)) await link.retry(failure, failures++, signal);
      else throw failure;
    }
  }
  yield* closing(last);
}

function isTemporary({ status }: ApiError): boolean {
  return status === 0 || status === 401 || status === 408 || status === 429 || status >= 500;
}

/** Ends a response. Throws ApiError. */
export async function cancelResponse(id: string, key: string): Promise<void> {
  await call(`/v1/responses/${id}/cancel`, key, { method: "POST" });
}

async function read(id: string, key: string, signal: AbortSignal): Promise<Response> {
  return (await (await call(`/v1/responses/${id}`, key, { signal })).json()) as Response;
}

const LAST: readonly string[] = ["response.completed", "response.incomplete", "response.failed"];

interface Event {
  type: string;
  sequence_number: number;
  delta?: string;
  logprobs?: WireToken[];
  item?: Item;
  response?: Response;
}

type WireToken = WireCandidate & { top_logprobs?: WireCandidate[] };

interface Item {
  type: string;
  content?: { text: string; logprobs?: WireToken[] }[];
  call_id?: string;
  name?: string;
  arguments?: string;
}

interface Response {
  status: string;
  output: Item[];
  error?: { code: string; message: string } | null;
  usage?: {
    input_tokens: number;
    output_tokens: number;
    input_tokens_details: { cached_tokens: number };
  } | null;
}

function isOpen({ status }: Response): boolean {
  return status === "queued" || status === "in_progress";
}

function* piecesOf({ type, delta = "", logprobs = [], item }: Event): Generator<Piece> {
  if (type === "response.output_text.delta") yield* textOf(delta, logprobs);
  else if (type === "response.reasoning_text.delta") yield { kind: "reasoning", text: delta };
  else if (type === "response.output_item.done" && item) yield* callOf(item);
}

function* textOf(text: string, logprobs: readonly WireToken[]): Generator<Piece> {
  if (logprobs.length > 0) {
    const tokens = logprobs.map((each) => ({
      ...tokenOf(each),
      top: (each.top_logprobs ?? []).map(tokenOf),
    }));
    yield { kind: "tokens", tokens };
  }
  yield { kind: "text", text };
}

/** The protocol has no bytes for a part of a character where chat completions have null. */
function tokenOf(wire: WireCandidate) {
  return candidate({ ...wire, bytes: wire.bytes?.length === 0 && wire.token !== "" ? null : wire.bytes });
}

function* callOf(item: Item): Generator<Piece> {
  if (item.type !== "function_call") return;
  const { call_id: id = "", name = "", arguments: text = "" } = item;
  yield { kind: "call", call: { id, name, arguments: text } };
}

/** The whole output in place of what came before. One that failed has only its finished items: what came has more. */
function* outputOf(response: Response): Generator<Piece> {
  if (response.status !== "completed" && response.status !== "incomplete") return;
  yield { kind: "restart" };
  for (const item of response.output) {
    for (const { text, logprobs = [] } of item.content ?? []) {
      if (item.type === "reasoning") yield { kind: "reasoning", text };
      else yield* textOf(text, logprobs);
    }
    yield* callOf(item);
  }
}

function* closing({ status, error, usage, output }: Response): Generator<Piece> {
  if (usage) {
    const { input_tokens: promptTokens, output_tokens: completionTokens } = usage;
    const { cached_tokens: cachedTokens } = usage.input_tokens_details;
    yield { kind: "usage", usage: { promptTokens, cachedTokens, completionTokens } };
  }
  if (status === "failed") {
    const code = error?.code ?? "error";
    throw new ApiError(error?.message ?? "", code === "rate_limit_exceeded" ? 429 : 200, code);
  }
  const hasCalls = output.some(({ type }) => type === "function_call");
  const reason =
    { incomplete: "length", cancelled: "cancelled" }[status] ?? (hasCalls ? "tool_calls" : "stop");
  yield { kind: "finish", reason };
}
