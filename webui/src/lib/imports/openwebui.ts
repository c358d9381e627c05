// Open WebUI's export: a list of records, whose `chat` has `history: { messages, currentId }`: messages by id with
// `parentId`. Times are in seconds. Reasoning and tool calls are HTML `<details>` at the beginning of the content.

import { chatOf, fromSeconds, isObject, text, type Json, type Node, type Shown } from "./foreign";

export function isOpenWebUi(value: Json): boolean {
  const history = chatIn(value).history;
  return isObject(history) && isObject(history.messages);
}

const chatIn = (value: Json): Json => (isObject(value.chat) ? value.chat : value);

export function fromOpenWebUi(value: Json): Json | null {
  const chat = chatIn(value);
  const history = chat.history as Json;
  const nodes = Object.entries(history.messages as Json).map(([id, message]): Node => {
    if (!isObject(message)) return { id, parent: null, shown: null };
    const parent = typeof message.parentId === "string" ? message.parentId : null;
    return { id, parent, shown: shownOf(message) };
  });
  const fields = {
    title: value.title ?? chat.title,
    pinned: value.pinned,
    createdMs: fromSeconds(value.created_at),
    updatedMs: fromSeconds(value.updated_at),
  };
  return chatOf(fields, nodes, text(history.currentId));
}

function shownOf(message: Json): Shown {
  const { reasoning, content } = splitDetails(text(message.content));
  const files = Array.isArray(message.files) ? (message.files as unknown[]) : [];
  return {
    role: text(message.role),
    content,
    reasoning,
    createdMs: fromSeconds(message.timestamp),
    model: message.model,
    attachments: files
      .filter(isObject)
      .map(fileOf)
      .filter(({ text }) => text !== ""),
  };
}

function fileOf(value: Json): { name: string; kind: "text"; text: string } {
  const inner = isObject(value.file) ? value.file : {};
  const data = isObject(inner.data) ? inner.data : {};
  return { name: text(value.name) || text(inner.filename), kind: "text", text: text(data.content) };
}

const OPEN = '<details type="';
const CLOSE = "</details>";

/** Takes the blocks of reasoning and of tool calls out of a content. */
function splitDetails(content: string): { reasoning: string; content: string } {
  const reasoning: string[] = [];
  const rest: string[] = [];
  let at = 0;
  for (;;) {
    const start = content.indexOf(OPEN, at);
    const end = start < 0 ? -1 : content.indexOf(CLOSE, start);
    if (end < 0) break;
    rest.push(content.slice(at, start));
    if (content.startsWith("reasoning", start + OPEN.length))
      reasoning.push(quoteIn(content.slice(start, end)));
    at = end + CLOSE.length;
  }
  rest.push(content.slice(at));
  return { reasoning: reasoning.join("\n\n"), content: rest.join("").trim() };
}

const ENTITIES: Readonly<Record<string, string>> = { lt: "<", gt: ">", amp: "&", quot: '"', "#x27": "'" };

/** The quoted lines after the summary of a `<details>`. */
function quoteIn(block: string): string {
  const summary = block.indexOf("</summary>");
  const body = summary < 0 ? block.slice(block.indexOf(">") + 1) : block.slice(summary + "</summary>".length);
  const plain = body.replace(/&(lt|gt|amp|quot|#x27);/g, (_, name: string) => ENTITIES[name]!);
  return plain.replace(/^> ?/gm, "").trim();
}
