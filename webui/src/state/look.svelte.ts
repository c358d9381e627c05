// How the page looks and speaks, and what answers are asked with. Kept in the browser's store.

import { DEFAULT_CHAT, type Preset } from "../lib/params";
import type { Db } from "../lib/db";
import { LANGUAGES, type Language } from "../lib/i18n";
import type { ChatSettings } from "../lib/types";

export type Theme = "system" | "light" | "dark";
export const FONT_SIZES = [14, 15, 16, 18, 20] as const;

interface Kept {
  theme: Theme;
  language: Language;
  fontPx: number;
  chat: ChatSettings;
  presets: Preset[];
  sidebar: boolean;
  closedGroups: string[];
  /** The model names chats after their first answer. */
  modelTitles: boolean;
  /** Answers are generated in the background, where the server stores responses. */
  background: boolean;
}

const KEY = "settings";

function browserLanguage(): Language {
  const wanted = navigator.languages.map((tag) => tag.slice(0, 2));
  return wanted.find((tag): tag is Language => tag in LANGUAGES) ?? "en";
}

export class Settings {
  #db: Db | null = null;
  kept = $state.raw<Kept>({
    theme: "system",
    language: browserLanguage(),
    fontPx: 16,
    chat: DEFAULT_CHAT,
    presets: [],
    sidebar: true,
    closedGroups: [],
    modelTitles: false,
    background: false,
  });

  async load(db: Db | null): Promise<void> {
    this.#db = db;
    const stored = await db?.value<Partial<Kept>>(KEY);
    this.kept = { ...this.kept, ...stored };
    this.#apply();
  }

  set(fields: Partial<Kept>): void {
    this.kept = { ...this.kept, ...fields };
    this.#apply();
    void this.#db?.putValue(KEY, this.kept);
  }

  #apply(): void {
    const root = document.documentElement;
    root.dataset.theme = this.kept.theme;
    root.lang = this.kept.language === "zh" ? "zh-CN" : "en";
    root.style.setProperty("font-size", `${this.kept.fontPx}px`);
  }
}

export const settings = new Settings();
