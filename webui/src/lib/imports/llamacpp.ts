// The export of llama.cpp's web UI: one or several `{ conv: { name, currNode, lastModified }, messages }`. A message has
// `parent`, `timestamp` in milliseconds, its reasoning, and its files in `extra`. The first one, of type `root`, is empty.

import { chatOf, isObject, text, type Json, type Node, type Shown } from "./foreign";

export function isLlamaCpp(value: Json): boolean {
  return isObject(value.conv) && Array.isArray(value.messages);
}

export function fromLlamaCpp(value: Json): Json | null {
  const conv = value.conv as Json;
  const messages = (value.messages as unknown[]).filter(isObject);
  const nodes = messages.map((message): Node => {
    const parent = text(message.parent) || (typeof message.parent === "number" ? `${message.parent}` : null);
    return { id: idOf(message.id), parent, shown: message.type === "root" ? null : shownOf(message) };
  });
  const fields = { title: conv.name, updatedMs: conv.lastModified, createdMs: messages[0]?.timestamp };
  return chatOf(fields, nodes, idOf(conv.currNode));
}

// Early versions number their messages.
const idOf = (value: unknown) => (typeof value === "number" ? `${value}` : text(value));

function shownOf(message: Json): Shown | null {
  const extra = Array.isArray(message.extra) ? (message.extra as unknown[]) : [];
  const shown = {
    role: text(message.role),
    content: text(message.content),
    reasoning: text(message.reasoningContent) || text(message.thinking),
    createdMs: message.timestamp,
    model: message.model,
    attachments: extra
      .filter(isObject)
      .map(fileOf)
      .filter(({ text }) => text !== ""),
  };
  return shown.role === "system" && shown.content === "" ? null : shown;
}

function fileOf(value: Json): { name: string; kind: "text" | "pdf"; text: string } {
  const kind = /^pdf/i.test(text(value.type)) ? "pdf" : "text";
  return { name: text(value.name), kind, text: text(value.content) };
}
