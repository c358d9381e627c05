// Files that the reader saves and opens.

import { fileName, fromFile, ImportError, toJson, toMarkdown, type Whole } from "../lib/transfer";
import { fromMessages, path } from "../lib/tree";
import type { Session } from "../lib/types";
import { library } from "./library.svelte";
import { t, ui } from "./ui.svelte";

export async function exportJson(sessions: readonly Session[]): Promise<void> {
  const wholes: Whole[] = [];
  for (const session of sessions) wholes.push(await library.whole(session));
  const name = sessions.length === 1 ? sessions[0]!.title : "llaisys-chats";
  save(fileName(name, "json"), toJson(wholes), "application/json");
}

export async function exportMarkdown(session: Session): Promise<void> {
  const { messages } = await library.whole(session);
  const shown = path(fromMessages(messages, session.chosen));
  save(fileName(session.title, "md"), toMarkdown(session.title, shown), "text/markdown");
}

export async function importFiles(files: readonly File[]): Promise<void> {
  const read: Whole[] = [];
  for (const file of files) {
    try {
      read.push(...fromFile(file.name, await file.text(), Date.now()));
    } catch (error) {
      if (!(error instanceof ImportError)) throw error;
      ui.toast(t(error.key, { name: file.name, detail: error.detail }));
    }
  }
  if (read.length === 0) return;
  await library.add(read);
  ui.toast(t("imported", { n: read.length }));
  if (read.length === 1) await library.show(read[0]!.session.id);
}

function save(name: string, content: string, type: string): void {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
