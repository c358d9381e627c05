// Files that the reader saves and opens.

import { fileName, fromFile, ImportError, toJson, toMarkdown, type Whole } from "../lib/transfer";
import { fromMessages, path } from "../lib/tree";
import type { Session } from "../lib/types";
import { library } from "./library.svelte";
import { t, ui } from "./ui.svelte";

/** A browser can parse this much at once. */
const BYTES_MAX = 256 * 2 ** 20;

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
  let nSkipped = 0;
  for (const file of files) {
    if (file.size > BYTES_MAX) {
      ui.toast(t("file_too_large", { name: file.name, mib: BYTES_MAX / 2 ** 20 }));
      continue;
    }
    try {
      const { wholes, skipped } = fromFile(file.name, await file.text(), Date.now());
      for (const whole of wholes) read.push(whole);
      nSkipped += skipped;
    } catch (error) {
      if (!(error instanceof ImportError)) throw error;
      ui.toast(t(error.key, { name: file.name, detail: error.detail }));
    }
  }
  if (read.length === 0) return;
  await library.add(read);
  ui.toast(t(nSkipped > 0 ? "imported_some" : "imported", { n: read.length, skipped: nSkipped }));
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
