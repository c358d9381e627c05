// The page's texts. English defines the keys; every other language must have them all.

import { en } from "./en";
import { zh } from "./zh";

export type Key = keyof typeof en;
export type Vars = Readonly<Record<string, string | number>>;
export type Language = "en" | "zh";

export const LANGUAGES: Readonly<Record<Language, { name: string; texts: Readonly<Record<Key, string>> }>> = {
  en: { name: "English", texts: en },
  zh: { name: "中文", texts: zh },
};

/** A text with `{name}` replaced by the variables. */
export function translate(language: Language, key: Key, vars: Vars = {}): string {
  return LANGUAGES[language].texts[key].replace(/\{(\w+)\}/g, (whole, name: string) =>
    String(vars[name] ?? whole),
  );
}
