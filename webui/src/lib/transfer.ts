// Export and import. JSON holds whole sessions with all branches; Markdown holds the chosen path of one.

import { attachmentsOf, sentText } from "./attachments";
import { newId } from "./id";
import { fromChatGpt, isChatGpt } from "./imports/chatgpt";
import { isObject, text, type Json } from "./imports/foreign";
import { fromLlamaCpp, isLlamaCpp } from "./imports/llamacpp";
import { fromOpenWebUi, isOpenWebUi } from "./imports/openwebui";
import { readTimeUse } from "./timeline";
import { cleanTitle, titleOf } from "./title";
import { fromMessages } from "./tree";
import { EFFORTS, type ChatSettings, type Effort, type End, type Failure, type Message } from "./types";
import type { Params, Role, Run, Session, Timing, ToolCall } from "./types";

const FORMAT = "llaisys-chats";
const VERSION = 1;

export interface Whole {
  session: Session;
  messages: Message[];
}

/** A file that cannot be read; the message is a key of the page's texts. */
export class ImportError extends Error {
  constructor(
    readonly key:
      | "import_not_json"
      | "import_not_chats"
      | "import_newer"
      | "import_empty"
      | "import_zip"
      | "import_too_many",
    readonly detail = "",
  ) {
    super(`${key} ${detail}`);
  }
}

export function newSession(nowMs: number, fields: Partial<Session> = {}): Session {
  return {
    id: newId(),
    title: "",
    renamed: false,
    pinned: false,
    folder: "",
    createdMs: nowMs,
    updatedMs: nowMs,
    changedMs: nowMs,
    chosen: {},
    draft: "",
    settings: null,
    contextFrom: null,
    ...fields,
  };
}

export function toJson(sessions: readonly Whole[]): string {
  const chats = sessions.map(({ session, messages }) => ({ ...session, messages }));
  return JSON.stringify({ format: FORMAT, version: VERSION, chats }, null, 1);
}

/** A session as the server keeps it, which `fromDocument` reads back. Drafts stay where they are written. */
export function toDocument({ session, messages }: Whole): Record<string, unknown> {
  return { ...session, draft: "", messages };
}

/** A session that this page wrote to the server, ids and all; null if it is none. */
export function fromDocument(id: string, document: unknown): Whole | null {
  if (!isObject(document) || document.id !== id || !Array.isArray(document.messages)) return null;
  const { messages, ...fields } = document;
  const kept = new Map((messages as unknown[]).filter(isObject).map((one) => [text(one.id), text(one.id)]));
  const read = wholeOf(document, 0, kept);
  const changedMs = time(fields.changedMs, 1);
  return { messages: read.messages, session: { ...read.session, id, changedMs } };
}

/** What a file holds: its sessions, and how many entries of it are none that can be read. */
export interface Imported {
  wholes: Whole[];
  skipped: number;
}

/**
 * The sessions of an export, of this page or of another program, with new ids, so that importing twice never overwrites.
 * Throws ImportError.
 */
export function fromJson(text: string, nowMs: number): Imported {
  let root: unknown;
  try {
    root = JSON.parse(text);
  } catch {
    throw new ImportError(text.startsWith("PK") ? "import_zip" : "import_not_json");
  }
  if (!isObject(root) || root.format !== FORMAT || !Array.isArray(root.chats)) return fromOthers(root, nowMs);
  if (typeof root.version !== "number" || root.version > VERSION) {
    throw new ImportError("import_newer", String(root.version));
  }
  const chats = root.chats.filter(isObject);
  if (chats.length === 0) throw new ImportError("import_empty");
  checkNumber(chats.length);
  return {
    wholes: chats.map((chat) => wholeOf(chat, nowMs)),
    skipped: root.chats.length - chats.length,
  };
}

const CHATS_MAX = 50_000;

function checkNumber(n: number): void {
  if (n > CHATS_MAX) throw new ImportError("import_too_many", String(CHATS_MAX));
}

const OTHERS: readonly [is: (value: Json) => boolean, read: (value: Json) => Json | null][] = [
  [isChatGpt, fromChatGpt],
  [isOpenWebUi, fromOpenWebUi],
  [isLlamaCpp, fromLlamaCpp],
];

/** The chats of another program's export: a list of them, or one. */
function fromOthers(root: unknown, nowMs: number): Imported {
  const all: unknown[] = Array.isArray(root) ? root : [root];
  checkNumber(all.length);
  const wholes: Whole[] = [];
  let isKnown = false;
  for (const value of all) {
    const read = isObject(value) ? OTHERS.find(([is]) => is(value))?.[1] : undefined;
    isKnown ||= read !== undefined;
    const chat = read?.(value as Json) ?? null;
    const whole = chat && wholeOf(chat, nowMs);
    if (whole && whole.messages.length > 0) wholes.push(whole);
  }
  if (!isKnown) throw new ImportError("import_not_chats");
  if (wholes.length === 0) throw new ImportError("import_empty");
  return { wholes, skipped: all.length - wholes.length };
}

const time = (value: unknown, otherwise: number) =>
  typeof value === "number" && Number.isFinite(value) && value > 0 ? value : otherwise;

/** One chat of a file. Nothing is believed: each field is taken only if it has the right type. */
function wholeOf(chat: Json, nowMs: number, ids: Map<string, string> = new Map()): Whole {
  const raw = (Array.isArray(chat.messages) ? chat.messages : []).filter(isObject);
  for (const message of raw) if (!ids.has(text(message.id))) ids.set(text(message.id), newId());
  const read = raw.map((message, i) => messageOf(message, ids, nowMs + i)).filter((m) => m !== null);
  const chosen: Record<string, string> = {};
  if (isObject(chat.chosen)) {
    for (const [parent, child] of Object.entries(chat.chosen)) {
      const [from, to] = [parent === "" ? "" : ids.get(parent), ids.get(text(child))];
      if (from !== undefined && to !== undefined) chosen[from] = to;
    }
  }
  // Only what hangs together is kept.
  const tree = fromMessages(read, chosen);
  const messages = [...tree.messages.values()];
  const session = newSession(nowMs, {
    title: cleanTitle(text(chat.title)) || titleOf(messages[0]?.content ?? ""),
    renamed: chat.renamed === true,
    pinned: chat.pinned === true,
    folder: cleanTitle(text(chat.folder)),
    createdMs: time(chat.createdMs, nowMs),
    updatedMs: time(chat.updatedMs, nowMs),
    chosen,
    draft: text(chat.draft),
    settings: settingsOf(chat.settings),
    contextFrom: ids.get(text(chat.contextFrom)) ?? null,
  });
  return { session, messages };
}

const ROLES: readonly string[] = ["system", "user", "assistant", "tool"];
const ENDS: readonly string[] = ["stop", "length", "stopped", "error", "running", "edited", "tool_calls"];

function messageOf(value: Json, ids: ReadonlyMap<string, string>, nowMs: number): Message | null {
  if (typeof value.role !== "string" || !ROLES.includes(value.role)) return null;
  if (typeof value.content !== "string") return null;
  const message: Message = {
    id: ids.get(text(value.id))!,
    parent: value.parent === null ? null : (ids.get(text(value.parent)) ?? "lost"),
    role: value.role as Role,
    content: value.content,
    createdMs: time(value.createdMs, nowMs),
  };
  if (text(value.reasoning)) message.reasoning = text(value.reasoning);
  if (text(value.model)) message.model = text(value.model);
  Object.assign(message, effortOf(value.effort));
  if (text(value.toolCallId)) message.toolCallId = text(value.toolCallId);
  const attachments = attachmentsOf(value.attachments);
  if (attachments.length > 0) message.attachments = attachments;
  if (ENDS.includes(text(value.end))) message.end = value.end as End;
  if (Array.isArray(value.toolCalls)) message.toolCalls = value.toolCalls.filter(isObject).map(toolCallOf);
  const usage = numbersOf(value.usage, ["promptTokens", "cachedTokens", "completionTokens"] as const);
  if (usage)
    message.usage = { ...usage, ...numbersOf(value.usage, ["draftTokens", "acceptedTokens"] as const) };
  const timing = timingOf(value.timing);
  if (timing) message.timing = timing;
  const run = runOf(value.run);
  if (run) message.run = run;
  const timeUse = readTimeUse(value.timeUse);
  if (timeUse) message.timeUse = timeUse;
  if (isObject(value.failure)) message.failure = failureOf(value.failure);
  return message;
}

function timingOf(value: unknown): Timing | null {
  const timing = numbersOf(value, ["firstTokenMs", "totalMs"] as const);
  return timing && { ...timing, ...numbersOf(value, ["reasoningMs"] as const) };
}

const RESPONSE_ID = /^resp_[\w.-]{1,64}$/;

function runOf(value: unknown): Run | null {
  const numbers = numbersOf(value, ["content", "reasoning", "askedMs"] as const);
  if (!numbers || !isObject(value) || !RESPONSE_ID.test(text(value.id))) return null;
  const timing = timingOf(value.timing);
  const after = Number.isInteger(value.after) ? Number(value.after) : null;
  const first = numbersOf(value, ["firstMs"] as const);
  return { id: text(value.id), after, ...numbers, ...first, ...(timing ? { timing } : {}) };
}

function toolCallOf(value: Json): ToolCall {
  return { id: text(value.id), name: text(value.name), arguments: text(value.arguments) };
}

function failureOf(value: Json): Failure {
  const { status, retryAtMs } = value;
  return {
    status: typeof status === "number" && Number.isInteger(status) ? status : 0,
    code: text(value.code) || "error",
    message: text(value.message),
    retryAtMs: typeof retryAtMs === "number" && Number.isFinite(retryAtMs) ? retryAtMs : null,
  };
}

function numbersOf<K extends string>(value: unknown, names: readonly K[]): Record<K, number> | null {
  if (!isObject(value) || !names.every((name) => Number.isFinite(value[name]))) return null;
  return Object.fromEntries(names.map((name) => [name, value[name]])) as Record<K, number>;
}

function settingsOf(value: unknown): ChatSettings | null {
  if (!isObject(value)) return null;
  const params = isObject(value.params) ? (value.params as Params) : {};
  return {
    model: text(value.model),
    system: text(value.system),
    params,
    ...effortOf(value.effort),
    ...(text(value.schema) ? { schema: text(value.schema) } : {}),
    ...(text(value.tools) ? { tools: text(value.tools) } : {}),
  };
}

function effortOf(value: unknown): { effort?: Effort } {
  const effort = EFFORTS.find((known) => known === value);
  return effort ? { effort } : {};
}

// --- Markdown: a heading, then each message under a comment that says whose it is ---

const MARK = /^<!-- llaisys: (system|user|assistant|tool) -->$/;
const ANY_MARK = /^(\\*)(<!-- llaisys: (?:system|user|assistant|tool) -->)$/gm;
const NAMES: Record<Role, string> = { system: "System", user: "You", assistant: "Assistant", tool: "Tool" };

/** A conversation as a readable file, which `fromMarkdown` reads back. */
export function toMarkdown(title: string, path: readonly Message[]): string {
  const parts = path.map((message) => {
    const { role, reasoning } = message;
    const thought = reasoning ? `<think>\n${reasoning}\n</think>\n` : "";
    const body = (thought + sentText(message)).replace(ANY_MARK, "\\$1$2");
    return `<!-- llaisys: ${role} -->\n**${NAMES[role]}**\n\n${body}\n`;
  });
  return [`# ${title}\n`, ...parts].join("\n");
}

/** The session of a file that `toMarkdown` made. Throws ImportError. */
export function fromMarkdown(file: string, nowMs: number): Whole {
  const messages: Message[] = [];
  let title = "";
  let current: { role: Role; lines: string[] } | null = null;
  const close = () => {
    if (current === null) return;
    // After the mark: the name in bold and an empty line; after the body: one line's end.
    const body = current.lines.slice(2).join("\n").replace(/\n$/, "");
    messages.push({
      id: newId(),
      parent: messages.at(-1)?.id ?? null,
      role: current.role,
      content: body.replace(ANY_MARK, (whole) => whole.slice(1)),
      createdMs: nowMs + messages.length,
      ...(current.role === "assistant" ? { end: "stop" as const } : {}),
    });
  };
  for (const line of file.replaceAll("\r\n", "\n").split("\n")) {
    const role = MARK.exec(line)?.[1] as Role | undefined;
    if (role !== undefined) {
      close();
      current = { role, lines: [] };
    } else if (current !== null) {
      current.lines.push(line);
    } else if (title === "" && line.startsWith("# ")) {
      title = cleanTitle(line.slice(2));
    }
  }
  close();
  if (messages.length === 0) throw new ImportError("import_not_chats");
  const named = title || titleOf(messages[0]!.content);
  return { session: newSession(nowMs, { title: named, renamed: title !== "" }), messages };
}

/** The file's sessions, whichever of the two forms it has. Throws ImportError. */
export function fromFile(name: string, content: string, nowMs: number): Imported {
  if (!/\.(md|markdown)$/i.test(name)) return fromJson(content, nowMs);
  return { wholes: [fromMarkdown(content, nowMs)], skipped: 0 };
}

/** A name for a file: letters and digits of the title, the form's ending. */
export function fileName(title: string, ending: "json" | "md"): string {
  const safe = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return `${safe.slice(0, 50) || "chats"}.${ending}`;
}
