// The values that the page keeps. What is stored and exported has exactly these shapes.

import type { TimeUse } from "./timeline";

export type Role = "system" | "user" | "assistant" | "tool";

/** Why an answer ended. `running`: it has not; one found in the store without a `run` was cut off by a reload. */
export type End = "stop" | "length" | "stopped" | "error" | "running" | "edited" | "tool_calls";

export interface Usage {
  promptTokens: number;
  /** Of the prompt tokens: those whose keys and values the server had already. */
  cachedTokens: number;
  completionTokens: number;
  /** Draft tokens that the server verified (speculative decoding), and those that became output. */
  draftTokens?: number;
  acceptedTokens?: number;
}

export interface Timing {
  /** From the request to the first piece of text, in milliseconds. */
  firstTokenMs: number;
  /** From the request to the end, in milliseconds. Of a continued answer: without the waits before later pieces. */
  totalMs: number;
  /** From the first token of the reasoning to its end, in milliseconds. */
  reasoningMs?: number;
}

export interface ToolCall {
  id: string;
  name: string;
  /** JSON, as the model wrote it: it may be cut or invalid. */
  arguments: string;
}

/** An error as the page shows it. `status` 0: there was no answer. */
export interface Failure {
  status: number;
  code: string;
  message: string;
  /** When the server would be asked again, in milliseconds since 1970; null if it gave no advice. */
  retryAtMs: number | null;
}

/** `paste`: a text that was pasted, too long for the message field. */
export type AttachmentKind = "text" | "pdf" | "paste";

/** A file that goes with a message, as its text. */
export interface Attachment {
  name: string;
  kind: AttachmentKind;
  text: string;
  /** Tokens of the block that is sent; absent: the server has not counted them. */
  tokens?: number;
}

/** A background response that an answer is read from. */
export interface Run {
  /** The response's id at the server. */
  id: string;
  /** The number of the last event that the answer's text has; null: none. */
  after: number | null;
  /** Lengths of the text and the reasoning that the answer had before: the response continues them. */
  content: number;
  reasoning: number;
  /** What the answer had before. */
  timing?: Timing;
  /** Since 1970. */
  askedMs: number;
  /** When its first text came, since 1970; absent: not yet. */
  firstMs?: number;
}

export interface Message {
  id: string;
  /** The message that this one follows; null for the first of a conversation. */
  parent: string | null;
  role: Role;
  content: string;
  createdMs: number;
  reasoning?: string;
  toolCalls?: ToolCall[];
  /** Of a tool's answer: the call that it answers. */
  toolCallId?: string;
  /** Of the user: the files that are sent before the text. */
  attachments?: Attachment[];
  model?: string;
  /** The effort that was asked for. */
  effort?: Effort;
  end?: End;
  /** While the server generates it in the background. */
  run?: Run;
  usage?: Usage;
  timing?: Timing;
  timeUse?: TimeUse;
  failure?: Failure;
}

/** Sampling parameters by their names on the wire; what is absent is the server's default. */
export type Params = Record<string, number | boolean | string[] | number[] | Record<string, number>>;

export const EFFORTS = ["none", "low", "medium", "high"] as const;
/** How much a model reasons before it answers. */
export type Effort = (typeof EFFORTS)[number];

/** What a conversation is asked with. `model` "" is the server's first. */
export interface ChatSettings {
  model: string;
  system: string;
  params: Params;
  /** Absent: as the model's template has it. */
  effort?: Effort;
  /** The JSON Schema of the answer, as it was typed; absent: free text. */
  schema?: string;
  /** A JSON list of the tools that the model may call, as it was typed; absent: none. */
  tools?: string;
}

export interface Session {
  id: string;
  title: string;
  /** The title is the user's own and no longer follows the first message. */
  renamed: boolean;
  pinned: boolean;
  /** "" is none. */
  folder: string;
  createdMs: number;
  updatedMs: number;
  /** When anything of it was changed last, a name or a draft too; of two copies the later one counts. */
  changedMs: number;
  /** Where a message has several children: the one on the path. The key of the first messages is "". */
  chosen: Record<string, string>;
  /** What stands in the composer, not sent. */
  draft: string;
  /** This session's own settings; null: those of all sessions. */
  settings: ChatSettings | null;
  /** The first message that is still sent; older ones are shown and left out. */
  contextFrom: string | null;
}
