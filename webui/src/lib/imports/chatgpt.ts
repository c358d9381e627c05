// ChatGPT's export (Settings, Data controls, Export data): `conversations.json` is a list of conversations. Each has a
// `mapping` from ids to nodes `{ id, message, parent, children }` and the `current_node`. Times are in seconds.

import { chatOf, fromSeconds, isObject, text, type Json, type Node, type Shown } from "./foreign";

export function isChatGpt(value: Json): boolean {
  return isObject(value.mapping);
}

export function fromChatGpt(value: Json): Json | null {
  const nodes = Object.entries(value.mapping as Json).map(([id, node]): Node => {
    const { parent, message } = isObject(node) ? node : {};
    return {
      id,
      parent: typeof parent === "string" ? parent : null,
      shown: isObject(message) ? shownOf(message) : null,
    };
  });
  const fields = {
    title: value.title,
    createdMs: fromSeconds(value.create_time),
    updatedMs: fromSeconds(value.update_time),
  };
  return chatOf(fields, nodes, text(value.current_node));
}

/** What a person sees of a message; null for system messages, tools, calls of tools and hidden ones. */
function shownOf(message: Json): Shown | null {
  const metadata = isObject(message.metadata) ? message.metadata : {};
  const role = isObject(message.author) ? text(message.author.role) : "";
  const recipient = message.recipient ?? "all";
  if (role !== "user" && role !== "assistant") return null;
  if (recipient !== "all" || message.weight === 0 || metadata.is_visually_hidden_from_conversation === true)
    return null;
  const content = isObject(message.content) ? textOf(message.content) : "";
  if (content === "") return null;
  return { role, content, createdMs: fromSeconds(message.create_time), model: metadata.model_slug };
}

// Marks around references to web pages, in characters of private use.
const REFERENCE = /\ue200[^\ue200\ue201]*\ue201/g;

function textOf(content: Json): string {
  if (content.content_type !== "text" && content.content_type !== "multimodal_text") return "";
  const parts = Array.isArray(content.parts) ? (content.parts as unknown[]) : [];
  // A part that is no text is an image, or the recording whose words are `text`.
  const texts = parts.map((part) => (isObject(part) ? text(part.text) : text(part)));
  return texts.filter(Boolean).join("\n\n").replace(REFERENCE, "").trim();
}
