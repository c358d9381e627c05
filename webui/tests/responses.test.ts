import { afterEach, describe, expect, it, vi } from "vitest";
import { ApiError, type Piece } from "../src/lib/api";
import { responseBody, streamResponse, type Link } from "../src/lib/responses";

type Answer = { status?: number; json?: unknown; events?: unknown[]; breaks?: boolean };

/** A server with these answers, one for each request; `asked` has the requests. */
function serve(...answers: Answer[]): { asked: string[]; bodies: unknown[] } {
  const asked: string[] = [];
  const bodies: unknown[] = [];
  vi.stubGlobal("fetch", (url: string, { method = "GET", body }: RequestInit) => {
    asked.push(`${method} ${url}`);
    if (body) bodies.push(JSON.parse(body as string));
    const next = answers.shift();
    if (!next) return Promise.reject(new TypeError("refused"));
    const { status = 200, json, events = [], breaks = false } = next;
    if (json !== undefined) return Promise.resolve(new Response(JSON.stringify(json), { status }));
    const frames = events.map((event) => new TextEncoder().encode(`data: ${JSON.stringify(event)}\n\n`));
    const stream = new ReadableStream({
      pull(control) {
        const frame = frames.shift();
        if (frame) control.enqueue(frame);
        else if (breaks) control.error(new TypeError("network error"));
        else control.close();
      },
    });
    return Promise.resolve(new Response(stream, { status }));
  });
  return { asked, bodies };
}

afterEach(() => vi.unstubAllGlobals());

const failures: ApiError[] = [];
const link: Link = {
  key: () => "",
  retry: (error) => {
    failures.push(error);
    return Promise.resolve();
  },
};

async function read(source: Parameters<typeof streamResponse>[0]): Promise<Piece[]> {
  failures.length = 0;
  const pieces: Piece[] = [];
  for await (const piece of streamResponse(source, link, new AbortController().signal)) pieces.push(piece);
  return pieces;
}

const text = (sequence_number: number, delta: string) => ({
  type: "response.output_text.delta",
  sequence_number,
  delta,
  logprobs: [],
});
const USAGE = { input_tokens: 7, output_tokens: 3, input_tokens_details: { cached_tokens: 5 } };
const response = (status: string, fields: object = {}) => ({
  id: "resp_a",
  status,
  output: [],
  usage: USAGE,
  ...fields,
});
const end = (
  sequence_number: number,
  status: "completed" | "incomplete" | "failed",
  fields: object = {},
) => ({
  type: `response.${status}`,
  sequence_number,
  response: response(status, fields),
});
const usage: Piece = { kind: "usage", usage: { promptTokens: 7, cachedTokens: 5, completionTokens: 3 } };
const finish = (reason: string): Piece => ({ kind: "finish", reason });
const at = (sequence: number): Piece => ({ kind: "at", sequence });
const said = (words: string): Piece => ({ kind: "text", text: words });
const id: Piece = { kind: "id", id: "resp_a" };

describe("the body of a background response", () => {
  it("asks what the chat request does", () => {
    const schema = { name: "answer", schema: { type: "object" } };
    const body = responseBody(
      {
        model: "m",
        temperature: 0.5,
        max_tokens: 9,
        logit_bias: { 5: 1 },
        chat_template_kwargs: { enable_thinking: false },
        response_format: { type: "json_schema", json_schema: schema },
        tools: [{ type: "function", function: { name: "add", parameters: {} } }],
        logprobs: true,
        top_logprobs: 5,
        continue_final_message: true,
        messages: [{ role: "user", content: "Hi" }],
      },
      "r1",
    );
    expect(body).toEqual({
      model: "m",
      temperature: 0.5,
      max_output_tokens: 9,
      logit_bias: { 5: 1 },
      chat_template_kwargs: { enable_thinking: false },
      text: { format: { type: "json_schema", ...schema } },
      tools: [{ type: "function", name: "add", parameters: {} }],
      include: ["message.output_text.logprobs"],
      top_logprobs: 5,
      continue_final_message: true,
      input: [{ type: "message", role: "user", content: "Hi" }],
      request_id: "r1",
      background: true,
      store: true,
      stream: true,
    });
  });

  it("has the items of each message", () => {
    const call = { id: "c1", type: "function" as const, function: { name: "add", arguments: "{}" } };
    const { input } = responseBody(
      {
        messages: [
          { role: "system", content: "Be brief." },
          { role: "assistant", content: "", reasoning_content: "hm", tool_calls: [call] },
          { role: "tool", content: "3", tool_call_id: "c1" },
          { role: "assistant", content: "Three." },
        ],
      },
      "r1",
    );
    expect(input).toEqual([
      { type: "message", role: "system", content: "Be brief." },
      { type: "reasoning", summary: [], content: [{ type: "reasoning_text", text: "hm" }] },
      { type: "function_call", call_id: "c1", name: "add", arguments: "{}" },
      { type: "function_call_output", call_id: "c1", output: "3" },
      { type: "message", role: "assistant", content: "Three." },
    ]);
  });
});

describe("the stream of a background response", () => {
  it("gives text, reasoning, calls, tokens and usage, with the number of each event", async () => {
    const wire = (token: string, bytes: number[]) => ({ token, logprob: -1, bytes });
    const item = { type: "function_call", call_id: "c1", name: "add", arguments: "{}" };
    const { asked, bodies } = serve({
      events: [
        { type: "response.created", sequence_number: 0, response: response("queued") },
        { type: "response.reasoning_text.delta", sequence_number: 1, delta: "hm" },
        {
          ...text(2, "é"),
          logprobs: [{ ...wire("\ufffd", []), top_logprobs: [wire("a", [97])] }, wire("\ufffd", [])],
        },
        { type: "response.output_item.done", sequence_number: 3, item },
        end(4, "completed", { output: [item] }),
      ],
    });
    const part = { text: "\ufffd", logprob: -1, isPart: true };
    expect(await read({ id: "resp_a", body: { input: "Hi" } })).toEqual([
      id,
      at(0),
      { kind: "reasoning", text: "hm" },
      at(1),
      {
        kind: "tokens",
        tokens: [
          { ...part, top: [{ text: "a", logprob: -1, isPart: false }] },
          { ...part, top: [] },
        ],
      },
      said("é"),
      at(2),
      { kind: "call", call: { id: "c1", name: "add", arguments: "{}" } },
      at(3),
      at(4),
      usage,
      finish("tool_calls"),
    ]);
    expect(asked).toEqual(["POST ./v1/responses"]);
    expect(bodies).toEqual([{ input: "Hi" }]);
  });

  it("is followed after the last event when the connection breaks, for as long as the server is away", async () => {
    const { asked } = serve(
      { events: [text(0, "a")], breaks: true },
      { status: 503, json: { error: { code: "model_loading", message: "wait" } } },
      { events: [text(1, "b")], breaks: true },
      { events: [text(2, "c"), end(3, "incomplete")] },
    );
    const pieces = await read({ id: "resp_a", body: {} });
    expect(pieces.filter(({ kind }) => kind === "text")).toEqual([said("a"), said("b"), said("c")]);
    expect(pieces.at(-1)).toEqual(finish("length"));
    expect(asked).toEqual([
      "POST ./v1/responses",
      "GET ./v1/responses/resp_a?stream=true&starting_after=0",
      "GET ./v1/responses/resp_a?stream=true&starting_after=0",
      "GET ./v1/responses/resp_a?stream=true&starting_after=1",
    ]);
    expect(failures.map(({ status }) => status)).toEqual([0, 503, 0]);
  });

  it("is not begun twice: a request that was refused is the caller's error", async () => {
    const { asked } = serve();
    await expect(read({ id: "resp_a", body: {} })).rejects.toMatchObject({ status: 0, code: "unreachable" });
    serve({ status: 429, json: { error: { code: "full", message: "no place" } } });
    await expect(read({ id: "resp_a", body: {} })).rejects.toMatchObject({
      status: 429,
      message: "no place",
    });
    expect(asked).toHaveLength(1);
  });

  it("is read whole if its events are gone, once it is complete", async () => {
    vi.useFakeTimers();
    const output = [
      { type: "reasoning", content: [{ type: "reasoning_text", text: "hm" }] },
      { type: "message", content: [{ type: "output_text", text: "whole", logprobs: [] }] },
    ];
    const dropped = { status: 400, json: { error: { code: "events_dropped", message: "gone" } } };
    const { asked } = serve(
      dropped,
      { json: response("in_progress", { usage: null }) },
      { json: response("completed", { output }) },
    );
    const reading = read({ id: "resp_a", after: 8 });
    await vi.runAllTimersAsync();
    vi.useRealTimers();
    expect(await reading).toEqual([
      id,
      { kind: "restart" },
      { kind: "reasoning", text: "hm" },
      said("whole"),
      usage,
      finish("stop"),
    ]);
    expect(asked[0]).toBe("GET ./v1/responses/resp_a?stream=true&starting_after=8");
    expect(asked[2]).toBe("GET ./v1/responses/resp_a");
  });

  it("keeps the text so far of a response that the server did not finish", async () => {
    const error = { code: "server_error", message: "The server stopped before the response was complete." };
    const lost = response("failed", { error, usage: null });
    serve({ status: 400, json: { error: { code: "events_dropped", message: "gone" } } }, { json: lost });
    await expect(read({ id: "resp_a", after: 8 })).rejects.toMatchObject(error);
  });

  it("says that the server does not know the response", async () => {
    serve({ status: 404, json: { error: { code: "not_found", message: "There is no such response." } } });
    await expect(read({ id: "resp_a", after: null })).rejects.toMatchObject({ code: "response_gone" });
  });

  it("tells a canceled response from a failed one", async () => {
    serve({ events: [end(0, "failed", { status: "cancelled" })] });
    expect((await read({ id: "resp_a" })).at(-1)).toEqual(finish("cancelled"));
    const error = { code: "context_length_exceeded", message: "too long" };
    serve({ events: [end(0, "failed", { error, usage: null })] });
    await expect(read({ id: "resp_a" })).rejects.toMatchObject(error);
  });

  it("ends when the reader stops it, also while it waits", async () => {
    serve({ json: response("in_progress") }, { json: response("in_progress") });
    const control = new AbortController();
    const waiting: Link = {
      ...link,
      retry: () => {
        control.abort();
        return Promise.resolve();
      },
    };
    const pieces = streamResponse({ id: "resp_a" }, waiting, control.signal);
    const all = (async () => {
      for await (const piece of pieces) if (piece.kind !== "id") throw new Error(piece.kind);
    })();
    serve();
    await expect(all).rejects.toMatchObject({ name: "AbortError" });
  });
});
