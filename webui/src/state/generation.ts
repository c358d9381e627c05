// One answer being made: reads the stream, tells the conversation once a frame at most, the store twice a second and when the page goes.

import { ApiError, fetchTimeline, streamChat, type Piece, type ToolPiece } from "../lib/api";
import { continuedTiming, continuedUsage } from "../lib/figures";
import { continueReasoning, splitReasoning } from "../lib/reasoning";
import { cancelResponse, newResponse, responseBody, streamResponse, type Link } from "../lib/responses";
import { continuedTimeUse, firstTokenOf, timeUse, type TimeUse } from "../lib/timeline";
import type { End, Failure, Message, Run, Timing, ToolCall, Usage } from "../lib/types";
import { batched } from "./frames";
import { chatOfRequest } from "./requests";

const SAVE_MS = 400;
const LEAVE_MS = 100;
/** A page that learned of the end so much later was away. */
const AWAY_MS = 2000;
const CANCEL_MS = 500;
const CANCEL_TRIES = 6;

export interface Sink {
  /** Each piece of the stream, before it is drawn. */
  seen(piece: Piece): void;
  /** The fields that changed; called once a frame at most. */
  draw(fields: Partial<Message>): void;
  /** Time to write the fields; at the first piece, twice a second at most, when the page goes, at the end. */
  save(fields: Partial<Message>): void;
  failed(error: ApiError): void;
}

/** Milliseconds since 1970, never going back. */
const now = () => performance.timeOrigin + performance.now();

export class Generation {
  readonly #control = new AbortController();
  /** The answer as it was before this request, which continues it. */
  readonly #before: Message;
  /** The answer as this page begins to read: of a resumed one it has more text. */
  readonly start: Message;
  /** The response was begun by a page that is gone, or by another one. */
  readonly isResumed: boolean;
  /** Of a background response; null of a stream that ends with its page. */
  #response: { id: string; after: number | null; link: Link } | null = null;
  readonly #startMs: number;
  #content = "";
  #reasoning = "";
  #tools: ToolCall[] = [];
  /** The answer was cut inside its reasoning, and the model has not closed it yet. */
  #isInReasoning = false;
  readonly #hadAnswer: boolean;
  #usage: Usage | undefined;
  #timeUse: TimeUse | undefined;
  #id = "";
  #firstMs: number | null;
  readonly #isFirstStored: boolean;
  #reasonedMs: number | null = null;
  #endMs: number | null = null;
  #end: End = "running";
  #failure: Failure | undefined;

  /**
   * `soFar`: the answer that is continued; its text comes before what the stream brings. With a `run` it is one that the
   * server generates already.
   */
  constructor(
    soFar: Message,
    readonly messageId = soFar.id,
  ) {
    const { run } = soFar;
    this.isResumed = run !== undefined;
    this.#before = run ? beforeRun(soFar, run) : soFar;
    // Where a reasoning ends inside a continued text is known only from the beginning.
    this.start = isCutInReasoning(this.#before) ? this.#before : soFar;
    this.#reset(this.start);
    this.#startMs = run?.askedMs ?? now();
    this.#firstMs = run?.firstMs ?? null;
    this.#isFirstStored = run?.firstMs !== undefined;
    this.#hadAnswer = splitReasoning(this.#before.content, this.#before.reasoning).answer !== "";
  }

  /** The server goes on with the answer without this page, and others can read it. */
  get isShared(): boolean {
    return this.#response !== null && this.#response.after !== null;
  }

  /** The server stops working on it; what came stays. */
  stop(): void {
    const { id, link } = this.#response ?? {};
    if (id === undefined || link === undefined) this.#control.abort();
    else if (this.isShared) void cancelResponse(id, link.key()).catch(() => this.#control.abort());
    else {
      this.#control.abort();
      void cancelSoon(id, link);
    }
  }

  /** Runs to the end, however it ends. */
  run(body: Record<string, unknown>, key: string, sink: Sink): Promise<void> {
    return this.#read(streamChat(body, key, this.#control.signal), () => key, sink);
  }

  /** As `run`, for an answer that does not end with this page. */
  runInBackground(body: Record<string, unknown>, link: Link, sink: Sink): Promise<void> {
    const { id, requestId } = newResponse();
    return this.#follow({ id, body: responseBody(body, requestId) }, link, sink);
  }

  /** Reads on in a response that the server generates already. */
  resume({ id, after }: Run, link: Link, sink: Sink): Promise<void> {
    return this.#follow({ id, after: this.start === this.#before ? null : after }, link, sink);
  }

  #follow(
    source: { id: string; body?: unknown; after?: number | null },
    link: Link,
    sink: Sink,
  ): Promise<void> {
    this.#response = { id: source.id, after: source.after ?? null, link };
    sink.draw(this.#fields());
    sink.save(this.#fields()); // a reload before the first piece finds it, too
    return this.#read(streamResponse(source, link, this.#control.signal), () => link.key(), sink);
  }

  async #read(pieces: AsyncGenerator<Piece>, key: () => string, sink: Sink): Promise<void> {
    const frames = batched(() => sink.draw(this.#fields()));
    const save = () => sink.save(this.#fields());
    let savedMs = -Infinity; // the first piece is written at once: a reload right after it finds it
    addEventListener("pagehide", save);
    try {
      for await (const piece of pieces) {
        sink.seen(piece);
        if (!this.#take(piece)) continue;
        frames.ask();
        // The text and the number of its last event are stored together.
        const isWhole = this.#response === null || piece.kind === "at";
        if (isWhole && now() - savedMs > SAVE_MS) {
          savedMs = now();
          save();
        }
      }
      this.#endMs = now();
      await this.#readTimeline(key());
      if (this.#end === "running") this.#end = "stop";
    } catch (error) {
      this.#endMs = now();
      if (!this.#control.signal.aborted) {
        // A page that is going sees its connections end first. It keeps what came, as cut, and is gone before it
        // could call that a failure.
        save();
        await new Promise((go) => setTimeout(go, LEAVE_MS));
      }
      this.#end = this.#control.signal.aborted ? "stopped" : "error";
      if (this.#end === "error") {
        if (!(error instanceof ApiError)) throw error;
        this.#failure = error.failure(Date.now());
        sink.failed(error);
      }
      await this.#readTimeline(key());
    } finally {
      removeEventListener("pagehide", save);
      if (this.#end === "running") this.#end = "error";
      frames.now();
      save();
    }
  }

  /** Returns false for a piece that changes nothing of the answer. */
  #take(piece: Piece): boolean {
    switch (piece.kind) {
      case "id":
        this.#id = piece.id;
        return false;
      case "tokens":
        return false;
      case "at":
        this.#response!.after = piece.sequence;
        return true;
      case "restart":
        this.#reset(this.#before);
        return true;
      case "usage":
        this.#usage = piece.usage;
        return true;
      case "finish":
        this.#end = endOf(piece.reason);
        return true;
      case "text":
        this.#append(piece.text);
        break;
      case "reasoning":
        this.#isInReasoning = false; // the server separates it
        this.#reasoning += piece.text;
        break;
      case "tool":
        this.#tools = withPiece(this.#tools, piece.tool);
        break;
      case "call":
        this.#tools = [...this.#tools, piece.call];
    }
    this.#firstMs ??= now();
    return true;
  }

  #reset(answer: Message): void {
    this.#content = answer.content;
    this.#reasoning = answer.reasoning ?? "";
    this.#tools = answer.toolCalls ?? [];
    this.#isInReasoning = isCutInReasoning(answer);
  }

  #append(text: string): void {
    if (!this.#isInReasoning) {
      this.#content += text;
      return;
    }
    const parts = continueReasoning(this.#reasoning, text);
    this.#reasoning = parts.reasoning;
    this.#content = parts.answer;
    this.#isInReasoning = parts.thinking;
  }

  async #readTimeline(key: string): Promise<void> {
    const timeline = this.#id === "" ? null : await fetchTimeline(this.#id, key);
    if (timeline === null) {
      // The page was away: it does not know how long the answer took.
      if (this.isResumed) this.#firstMs = null;
      return;
    }
    const { draftTokens, acceptedTokens } = timeline;
    if (this.#usage && draftTokens > 0) this.#usage = { ...this.#usage, draftTokens, acceptedTokens };
    this.#timeUse = timeUse(timeline, chatOfRequest);
    const endMs = this.#startMs + timeline.totalMs;
    if (this.#response === null || this.#firstMs === null) return;
    if (!this.isResumed && this.#endMs! < endMs + AWAY_MS) return;
    this.#endMs = endMs;
    const isFirstSeen = !this.isResumed || this.#isFirstStored;
    const firstMs = this.#startMs + firstTokenOf(timeline);
    this.#firstMs = isFirstSeen ? Math.min(this.#firstMs, endMs) : firstMs;
  }

  /** Null before the first token. */
  #timing(): Timing | null {
    if (this.#firstMs === null) return null;
    const nowMs = this.#endMs ?? now();
    const parts = splitReasoning(this.#content, this.#reasoning);
    if (parts.answer !== "") this.#reasonedMs ??= nowMs;
    const reasoningMs = (this.#reasonedMs ?? nowMs) - this.#firstMs;
    // A page that was away may have missed the end of the reasoning.
    const isTimed = parts.reasoning !== "" && !this.#hadAnswer && !this.isResumed;
    return {
      firstTokenMs: this.#firstMs - this.#startMs,
      totalMs: nowMs - this.#startMs,
      ...(isTimed ? { reasoningMs } : {}),
    };
  }

  #fields(): Partial<Message> {
    const timing = this.#timing();
    const before = this.#before;
    return {
      content: this.#content,
      reasoning: this.#reasoning || undefined,
      toolCalls: this.#tools.length > 0 ? this.#tools : undefined,
      usage: this.#usage ? continuedUsage(before.usage, this.#usage) : before.usage,
      timing: timing ? continuedTiming(before.timing, timing) : before.timing,
      timeUse: this.#timeUse ? continuedTimeUse(before.timeUse, this.#timeUse) : before.timeUse,
      end: this.#end,
      failure: this.#failure,
      run: this.#end === "running" ? this.#run() : undefined,
    };
  }

  #run(): Run | undefined {
    if (this.#response === null) return undefined;
    const { content, reasoning = "", timing } = this.#before;
    return {
      id: this.#response.id,
      after: this.#response.after,
      content: content.length,
      reasoning: reasoning.length,
      askedMs: this.#startMs,
      ...(this.#firstMs === null ? {} : { firstMs: this.#firstMs }),
      ...(timing ? { timing } : {}),
    };
  }
}

/** The answer as it was before this response. */
function beforeRun(answer: Message, run: Run): Message {
  const reasoning = (answer.reasoning ?? "").slice(0, run.reasoning);
  return {
    ...answer,
    content: answer.content.slice(0, run.content),
    reasoning: reasoning || undefined,
    toolCalls: undefined, // an answer that calls tools is not continued
    timing: run.timing,
  };
}

/** Ends a response that the server may not have begun yet. */
async function cancelSoon(id: string, link: Link): Promise<void> {
  for (let i = 0; i < CANCEL_TRIES; i++) {
    try {
      return await cancelResponse(id, link.key());
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404) return;
    }
    await new Promise((go) => setTimeout(go, CANCEL_MS));
  }
}

/** Whether an answer holds nothing but reasoning that the server separated from its text. */
export function isCutInReasoning(answer: Message): boolean {
  return answer.content === "" && Boolean(answer.reasoning) && !answer.toolCalls?.length;
}

function endOf(reason: string): End {
  if (reason === "cancelled") return "stopped";
  return reason === "length" || reason === "tool_calls" ? reason : "stop";
}

function withPiece(calls: readonly ToolCall[], piece: ToolPiece): ToolCall[] {
  const out = [...calls];
  const before = out[piece.index] ?? { id: "", name: "", arguments: "" };
  out[piece.index] = {
    id: piece.id ?? before.id,
    name: before.name + (piece.name ?? ""),
    arguments: before.arguments + (piece.arguments ?? ""),
  };
  return out.map((call) => call ?? { id: "", name: "", arguments: "" });
}
