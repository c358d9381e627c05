// What a settled block gets after it is in the page: colours for code and MathML for formulas. Both libraries are
// loaded when the first block needs them, never before.

import { code, maths } from "./sanitise";

// A longer one stays plain: colouring it would hold up the page.
const CODE_CHARS_MAX = 50_000;
const TEX_CHARS_MAX = 5_000;

/** Colours and formulas of one block; safe to call on a block that has neither. */
export async function enhance(block: HTMLElement): Promise<void> {
  const codes = [...block.querySelectorAll<HTMLElement>('pre > code[class^="language-"]:not(.language-)')];
  const formulas = [...block.querySelectorAll<HTMLElement>(".maths")];
  if (codes.length > 0) await highlight(codes);
  if (formulas.length > 0) await typeset(formulas);
}

async function highlight(elements: readonly HTMLElement[]): Promise<void> {
  const { default: highlighter } = await import("./highlighter");
  for (const element of elements) {
    const language = element.className.slice("language-".length).toLowerCase();
    const text = element.textContent ?? "";
    if (text.length > CODE_CHARS_MAX || !highlighter.getLanguage(language)) continue;
    element.innerHTML = code(highlighter.highlight(text, { language, ignoreIllegals: true }).value);
  }
}

async function typeset(elements: readonly HTMLElement[]): Promise<void> {
  const { default: katex } = await import("katex");
  for (const element of elements) {
    const tex = element.textContent ?? "";
    if (tex.length > TEX_CHARS_MAX) continue;
    const options = {
      output: "mathml",
      displayMode: element.classList.contains("display"),
      throwOnError: true,
      strict: "ignore",
      trust: false,
      maxExpand: 200,
      maxSize: 20,
    } as const;
    try {
      element.innerHTML = maths(katex.renderToString(tex, options));
    } catch {
      element.classList.add("bad"); // not TeX after all: the source stays
    }
  }
}
