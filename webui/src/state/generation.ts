// One answer being made: reads the stream, tells the conversation once a frame at most, the store twice a second and when the page goes.

import { ApiError, fetchTimeline, streamChat, type Piece, type ToolPiece } from "../lib/api";
import { continuedTiming, continuedUsage } from "../lib/figures";
import { continueReasoning, splitReasoning } from "../lib/reasoning";
import { continuedTimeUse, timeUse, type TimeUse } from "../lib/timeline";
import type { End, Failure, Message, Timing, ToolCall, Usage } from "../lib/types";
import { batched } from "./frames";
import { chatOfRequest } from "./requests";

const SAVE_MS = 400;
const LEAVE_MS = 100;

export interface Sink {
  /** Each piece of the stream, before it is drawn. */
  seen(piece: Piece): void;
  /** The fields that changed; called once a frame at most. */
  draw(fields: Partial<Message>): void;
  /** Time to write the fields; at the first piece, twice a second at most, when the page goes, at the end. */
  save(fields: Partial<Message>): void;
  failed(error: ApiError): void;
}

export class Generation {
  readonly #control = new AbortController();
  readonly #startMs = performance.now();
  #content: string;
  #reasoning: string;
  #tools: ToolCall[];
  /** The answer was cut inside its reasoning, and the model has not closed it yet. */
  #isInReasoning: boolean;
  readonly #hadAnswer: boolean;
  #usage: Usage | undefined;
  #timeUse: TimeUse | undefined;
  #id = "";
  #firstMs: number | null = null;
  #reasonedMs: number | null = null;
  #endMs: number | null = null;
  #end: End = "running";
  #failure: Failure | undefined;

  /** `soFar`: the answer that is continued; its text comes before what the stream brings. */
  constructor(
    private readonly soFar: Message,
    readonly messageId = soFar.id,
  ) {
    this.#content = soFar.content;
    this.#reasoning = soFar.reasoning ?? "";
    this.#tools = soFar.toolCalls ?? [];
    this.#isInReasoning = isCutInReasoning(soFar);
    this.#hadAnswer = splitReasoning(soFar.content, soFar.reasoning).answer !== "";
  }

  /** The server stops working on it; what came stays. */
  stop(): void {
    this.#control.abort();
  }

  /** Runs to the end, however it ends. */
  async run(body: Record<string, unknown>, key: string, sink: Sink): Promise<void> {
    const frames = batched(() => sink.draw(this.#fields()));
    const save = () => sink.save(this.#fields());
    let savedMs = -Infinity; // the first piece is written at once: a reload right after it finds it
    addEventListener("pagehide", save);
    try {
      for await (const piece of streamChat(body, key, this.#control.signal)) {
        sink.seen(piece);
        switch (piece.kind) {
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
          case "usage":
            this.#usage = piece.usage;
            break;
          case "id":
            this.#id = piece.id;
            continue;
          case "tokens":
            continue;
          case "finish":
            this.#end = endOf(piece.reason);
        }
        if (piece.kind !== "usage" && piece.kind !== "finish") this.#firstMs ??= performance.now();
        frames.ask();
        if (performance.now() - savedMs > SAVE_MS) {
          savedMs = performance.now();
          save();
        }
      }
      this.#endMs = performance.now();
      await this.#readTimeline(key);
      if (this.#end === "running") this.#end = "stop";
    } catch (error) {
      this.#endMs = performance.now();
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
      await this.#readTimeline(key);
    } finally {
      removeEventListener("pagehide", save);
      if (this.#end === "running") this.#end = "error";
      frames.now();
      save();
    }
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
    if (timeline === null) return;
    const { draftTokens, acceptedTokens } = timeline;
    if (this.#usage && draftTokens > 0) this.#usage = { ...this.#usage, draftTokens, acceptedTokens };
    this.#timeUse = timeUse(timeline, chatOfRequest);
  }

  /** Null before the first token. */
  #timing(): Timing | null {
    if (this.#firstMs === null) return null;
    const nowMs = this.#endMs ?? performance.now();
    const parts = splitReasoning(this.#content, this.#reasoning);
    if (parts.answer !== "") this.#reasonedMs ??= nowMs;
    const reasoningMs = (this.#reasonedMs ?? nowMs) - this.#firstMs;
    return {
      firstTokenMs: this.#firstMs - this.#startMs,
      totalMs: nowMs - this.#startMs,
      ...(parts.reasoning !== "" && !this.#hadAnswer ? { reasoningMs } : {}),
    };
  }

  #fields(): Partial<Message> {
    const timing = this.#timing();
    return {
      content: this.#content,
      reasoning: this.#reasoning || undefined,
      toolCalls: this.#tools.length > 0 ? this.#tools : undefined,
      usage: this.#usage ? continuedUsage(this.soFar.usage, this.#usage) : this.soFar.usage,
      timing: timing ? continuedTiming(this.soFar.timing, timing) : this.soFar.timing,
      timeUse: this.#timeUse ? continuedTimeUse(this.soFar.timeUse, this.#timeUse) : this.soFar.timeUse,
      end: this.#end,
      failure: this.#failure,
    };
  }
}

/** Whether an answer holds nothing but reasoning that the server separated from its text. */
export function isCutInReasoning(answer: Message): boolean {
  return answer.content === "" && Boolean(answer.reasoning) && !answer.toolCalls?.length;
}

function endOf(reason: string): End {
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
