// What of a conversation is sent, and what to leave out when it does not fit the model's context.

import { sentText } from "./attachments";
import type { ChatSettings, Message, Role, ToolCall } from "./types";

export interface WireMessage {
  role: Role;
  content: string;
  reasoning_content?: string;
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
  tool_call_id?: string;
}

/** The messages of a path from `from` on (null, or not on the path: all). */
export function sent(path: readonly Message[], from: string | null): readonly Message[] {
  const start = from === null ? -1 : path.findIndex((message) => message.id === from);
  return start < 0 ? path : path.slice(start);
}

/**
 * The `messages` of a request. Answers without any text are left out, and questions that then follow each other
 * become one, because many chat templates take only turns.
 */
export function wireMessages(settings: ChatSettings, messages: readonly Message[]): WireMessage[] {
  const out: WireMessage[] = [];
  if (settings.system.trim() !== "") out.push({ role: "system", content: settings.system });
  for (const message of messages) {
    const last = out.at(-1);
    if (message.role === "assistant" && !message.content && !message.toolCalls?.length) continue;
    if (message.role === "user" && last?.role === "user") last.content += `\n\n${sentText(message)}`;
    else out.push(wire(message));
  }
  return out;
}

function wire(message: Message): WireMessage {
  return {
    role: message.role,
    content: sentText(message),
    ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
    ...(message.toolCalls?.length ? { tool_calls: message.toolCalls.map(wireCall) } : {}),
    ...(message.toolCallId ? { tool_call_id: message.toolCallId } : {}),
  };
}

function wireCall(call: ToolCall) {
  return {
    id: call.id,
    type: "function" as const,
    function: { name: call.name, arguments: call.arguments },
  };
}

export interface ContextNumbers {
  limit: number;
  wanted: number;
}

/**
 * The two numbers of the server's refusal ("the context is 2048 tokens, and the request asks for 2114: ..."), or null
 * if it says something else.
 */
export function contextNumbers(message: string): ContextNumbers | null {
  const found = /\bis (\d+) tokens\b.*?\b(?:asks for|has) (\d+)/.exec(message);
  return found ? { limit: Number(found[1]), wanted: Number(found[2]) } : null;
}

// Share of the context that what is left may take, so that an answer and the next turns have room.
const ROOM = 0.6;

/**
 * The message to start from so that about `ROOM` of the context is used: a question, never the answer before it.
 * `tokens` is what the messages from `from` on took; it is spread over them by their length. At least one turn goes;
 * null if only the last question is left.
 */
export function dropOldest(
  path: readonly Message[],
  from: string | null,
  tokens: number,
  limit: number,
): string | null {
  const messages = sent(path, from);
  const size = (message: Message) => sentText(message).length + (message.reasoning?.length ?? 0) + 16;
  const total = messages.reduce((sum, message) => sum + size(message), 0);
  let left = total;
  let best: string | null = null;
  for (const [i, message] of messages.entries()) {
    if (i > 0 && message.role === "user") {
      best = message.id;
      if ((left / total) * tokens <= ROOM * limit) break;
    }
    left -= size(message);
  }
  return best;
}
