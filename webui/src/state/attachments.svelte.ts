// Files in the composer of each chat that are not sent yet. The browser keeps them as it keeps drafts.

import { countTokens } from "../lib/api";
import { attachmentsOf, blockOf, charsOf, CHARS_MAX, FILES_MAX, PASTE_CHARS } from "../lib/attachments";
import type { Db } from "../lib/db";
import { attachmentOf, FileError } from "../lib/filetext";
import type { Attachment } from "../lib/types";
import { library } from "./library.svelte";
import { settings } from "./look.svelte";
import { server } from "./server.svelte";
import { t, ui } from "./ui.svelte";

const KEY = "attachments";

class Attachments {
  /** By chat; "" is the chat that does not exist yet. */
  waiting = $state.raw<ReadonlyMap<string, readonly Attachment[]>>(new Map());
  /** The names of files that are being read. */
  reading = $state.raw<readonly string[]>([]);
  #db: Db | null = null;

  /** Reads what the browser keeps of the chats that it still has. */
  async load(db: Db | null, has: (chat: string) => boolean): Promise<void> {
    this.#db = db;
    const stored = (await db?.value<[string, unknown][]>(KEY)) ?? [];
    const kept = stored.filter(([chat]) => chat === "" || has(chat));
    this.waiting = new Map(kept.map(([chat, files]) => [chat, attachmentsOf(files)]));
  }

  of(chat: string | null): readonly Attachment[] {
    return this.waiting.get(chat ?? "") ?? [];
  }

  /** Reads files into the composer of a chat; one that cannot go with a message is refused by name. */
  async addFiles(chat: string | null, files: readonly File[]): Promise<void> {
    for (const file of files) {
      this.reading = [...this.reading, file.name];
      try {
        this.#add(chat, await attachmentOf(file));
      } catch (error) {
        if (!(error instanceof FileError)) throw error;
        const model = modelOf();
        ui.toast(t(error.key, { name: file.name, model, ...error.vars }));
      } finally {
        const at = this.reading.indexOf(file.name);
        this.reading = this.reading.filter((_, i) => i !== at);
      }
    }
  }

  /** Takes pasted files, and a text that is too long for the message field. */
  pasted(chat: string | null, event: ClipboardEvent): void {
    const data = event.clipboardData;
    const text = data?.getData("text/plain") ?? "";
    const files = [...(data?.files ?? [])];
    if (text.length >= PASTE_CHARS) {
      const n = this.of(chat).filter(({ kind }) => kind === "paste").length + 1;
      this.#guarded(t("file_paste"), () => {
        this.#add(chat, { name: t("file_paste_name", { n }), kind: "paste", text });
      });
    } else if (text === "" && files.length > 0) void this.addFiles(chat, files);
    else return;
    event.preventDefault();
  }

  remove(chat: string | null, file: Attachment): void {
    this.#set(
      chat,
      this.of(chat).filter((other) => other !== file),
    );
  }

  /** The files of a composer, which are sent now. */
  take(chat: string | null): readonly Attachment[] {
    const files = this.of(chat);
    if (files.length > 0) this.#set(chat, []);
    return files;
  }

  #guarded(name: string, work: () => void): void {
    try {
      work();
    } catch (error) {
      if (!(error instanceof FileError)) throw error;
      ui.toast(t(error.key, { name, ...error.vars }));
    }
  }

  #add(chat: string | null, file: Attachment): void {
    const before = this.of(chat);
    if (before.length >= FILES_MAX) throw new FileError("file_too_many", { max: FILES_MAX });
    if (charsOf(before) + file.text.length > CHARS_MAX) {
      throw new FileError("file_too_long", { max: CHARS_MAX });
    }
    this.#set(chat, [...before, file]);
    void this.#count(chat, file);
  }

  /** The chip shows no number if the server cannot count. */
  async #count(chat: string | null, file: Attachment): Promise<void> {
    const tokens = await countTokens(
      { model: modelOf(), prompt: blockOf(file), add_special_tokens: false },
      server.key,
    ).catch(() => undefined);
    if (tokens === undefined) return;
    this.#set(
      chat,
      this.of(chat).map((other) => (other === file ? { ...file, tokens } : other)),
    );
  }

  #set(chat: string | null, files: readonly Attachment[]): void {
    const all = new Map(this.waiting);
    if (files.length > 0) all.set(chat ?? "", files);
    else all.delete(chat ?? "");
    this.waiting = all;
    void this.#db?.putValue(KEY, [...all]);
  }
}

function modelOf(): string {
  const chat = library.current?.settings ?? library.newSettings ?? settings.kept.chat;
  return server.model(chat.model)?.id ?? "";
}

export const attachments = new Attachments();
