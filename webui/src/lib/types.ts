// The values that the page keeps. What is stored and exported has exactly these shapes.

export type Role = "system" | "user" | "assistant" | "tool";

/** Why an answer ended. `running`: it has not; one found in the store was cut off by a reload. */
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
  /** From the request to the end, in milliseconds. */
  totalMs: number;
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
  model?: string;
  end?: End;
  usage?: Usage;
  timing?: Timing;
  failure?: Failure;
}

/** Sampling parameters by their names on the wire; what is absent is the server's default. */
export type Params = Record<string, number | boolean | string[] | number[] | Record<string, number>>;

/** What a conversation is asked with. `model` "" is the server's first. */
export interface ChatSettings {
  model: string;
  system: string;
  params: Params;
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
