// Files that go with a message: how they are sent, and how a stored one is read.

import type { Attachment, AttachmentKind, Message } from "./types";

export const FILES_MAX = 10;
/** Characters of all files of one message. Even at three bytes each they fit the server's default body limit, 4 MiB. */
export const CHARS_MAX = 1_000_000;
/** A pasted text of this many characters becomes a file. */
export const PASTE_CHARS = 4000;

const KINDS: readonly string[] = ["text", "pdf", "paste"] satisfies AttachmentKind[];

/** The file as a block of Markdown under its name; the fence is longer than any inside. */
export function blockOf({ name, text, kind }: Attachment): string {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  const language = kind === "text" ? (/\.(\w{1,12})$/.exec(name)?.[1] ?? "") : "";
  return `${name}\n${fence}${language}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** The text of a message as the model gets it: its files, then what was written. */
export function sentText({ content, attachments }: Message): string {
  if (!attachments?.length) return content;
  const blocks = attachments.map(blockOf);
  return [...blocks, ...(content ? [content] : [])].join("\n\n");
}

export function charsOf(files: readonly Attachment[]): number {
  return files.reduce((sum, { text }) => sum + text.length, 0);
}

/** The attachments in a stored or imported value; whatever is none is left out. */
export function attachmentsOf(value: unknown): Attachment[] {
  if (!Array.isArray(value)) return [];
  const files: Attachment[] = [];
  for (const one of value.slice(0, FILES_MAX) as (Partial<Attachment> | null)[]) {
    const { name, kind, text, tokens } = one ?? {};
    if (typeof name !== "string" || typeof text !== "string") continue;
    files.push({
      name: nameOf(name),
      kind: KINDS.includes(kind ?? "") ? kind! : "text",
      text,
      ...(Number.isInteger(tokens) ? { tokens } : {}),
    });
  }
  return files;
}

const NAME_CHARS = 100;

/** A file's name on one line, without controls. */
export function nameOf(name: string): string {
  const line = name.replace(/[\p{C}\s]+/gu, " ").trim();
  return line.slice(-NAME_CHARS) || "file";
}
