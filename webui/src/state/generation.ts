// One answer being made: reads the stream, tells the conversation once a frame, the store twice a second and when the page goes.

import { ApiError, fetchDrafts, streamChat, type ToolPiece } from "../lib/api";
import type { End, Failure, Message, ToolCall, Usage } from "../lib/types";
import { batched } from "./frames";

const SAVE_MS = 400;
const LEAVE_MS = 100;

export interface Sink {
  /** The fields that changed; called once a frame. */
  draw(fields: Partial<Message>): void;
  /** Time to write what has been drawn; at the first piece, twice a second at most, when the page goes, at the end. */
  save(): void;
  failed(error: ApiError): void;
}

export class Generation {
  readonly #control = new AbortController();
  readonly #startMs = performance.now();
  #content: string;
  #reasoning: string;
  #tools: ToolCall[];
  #usage: Usage | undefined;
  #id = "";
  #firstMs: number | null = null;
  #endMs: number | null = null;
  #end: End = "running";
  #failure: Failure | undefined;

  /** `so far`: the answer that is continued; its text comes before what the stream brings. */
  constructor(
    soFar: Message,
    readonly messageId = soFar.id,
  ) {
    this.#content = soFar.content;
    this.#reasoning = soFar.reasoning ?? "";
    this.#tools = soFar.toolCalls ?? [];
  }

  /** The server stops working on it; what came stays. */
  stop(): void {
    this.#control.abort();
  }

  /** Runs to the end, however it ends. */
  async run(body: Record<string, unknown>, key: string, sink: Sink): Promise<void> {
    const frames = batched(() => sink.draw(this.#fields()));
    const save = () => {
      frames.now();
      sink.save();
    };
    let savedMs = -Infinity; // the first piece is written at once: a reload right after it finds it
    addEventListener("pagehide", save);
    try {
      for await (const piece of streamChat(body, key, this.#control.signal)) {
        switch (piece.kind) {
          case "text":
            this.#content += piece.text;
            break;
          case "reasoning":
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
      if (this.#usage && this.#id) this.#usage = { ...this.#usage, ...(await fetchDrafts(this.#id, key)) };
      if (this.#end === "running") this.#end = "stop";
    } catch (error) {
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
    } finally {
      removeEventListener("pagehide", save);
      if (this.#end === "running") this.#end = "error";
      save();
    }
  }

  #fields(): Partial<Message> {
    const nowMs = this.#endMs ?? performance.now();
    const timing =
      this.#firstMs === null
        ? undefined
        : { firstTokenMs: this.#firstMs - this.#startMs, totalMs: nowMs - this.#startMs };
    return {
      content: this.#content,
      reasoning: this.#reasoning || undefined,
      toolCalls: this.#tools.length > 0 ? this.#tools : undefined,
      usage: this.#usage,
      timing,
      end: this.#end,
      failure: this.#failure,
    };
  }
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
