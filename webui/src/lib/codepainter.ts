// Colors for one code block, also while it grows. The code is colored in chunks that end where the grammar is at its
// outermost level: a finished chunk keeps its nodes, and a new line costs only the last chunk. Where chunks end follows
// from the code alone, so that a streamed block and a stored one get the same colors.

import type highlighter from "./highlighter";
import { patchChildren } from "./patch";
import { code } from "./sanitize";

type Highlighter = typeof highlighter;

// A chunk ends with the first line that reaches one of these lengths at the outermost level; the last one ends it in
// any case.
const CHUNK_CHARS = [1000, 2000, 4000, 8000];
// Code after this stays plain.
const COLORED_CHARS_MAX = 100_000;

export class CodePainter {
  #language = "";
  /** The finished chunks: their characters, and their nodes. */
  #done = "";
  #nodes = 0;
  /** How many lengths were tried for the chunk after them. */
  #tried = 0;
  #isColored = false;

  constructor(private readonly element: HTMLElement) {}

  /**
   * Shows this code in the colors of its language, as far as `deadlineMs` (`performance.now`) allows; the rest is
   * plain. False if there is more to color. `highlighter` null: all of it is plain.
   */
  paint(text: string, language: string, highlighter: Highlighter | null, deadlineMs: number): boolean {
    if (language !== this.#language || !text.startsWith(this.#done)) {
      [this.#language, this.#done, this.#nodes, this.#tried] = [language, "", 0, 0];
    }
    const isLate = !this.#isColored && performance.now() > deadlineMs;
    if (highlighter === null || isLate) {
      this.#showRest(plain(text.slice(this.#done.length)));
      return !isLate;
    }
    this.#isColored = true;
    for (let end = this.#end(text); end > 0 && this.#done.length < COLORED_CHARS_MAX; end = this.#end(text)) {
      const chunk = text.slice(this.#done.length, end);
      const { value, _top } = highlighter.highlight(chunk, { language, ignoreIllegals: true });
      const isOutermost = (_top as { parent?: unknown } | undefined)?.parent === undefined;
      if (!isOutermost && ++this.#tried < CHUNK_CHARS.length) continue;
      this.#showRest(code(value));
      [this.#done, this.#nodes, this.#tried] = [text.slice(0, end), this.element.childNodes.length, 0];
      if (performance.now() <= deadlineMs) continue;
      this.#showRest(plain(text.slice(end)));
      return false;
    }
    const rest = text.slice(this.#done.length);
    if (this.#done.length >= COLORED_CHARS_MAX) this.#showRest(plain(rest));
    else this.#showRest(code(highlighter.highlight(rest, { language, ignoreIllegals: true }).value));
    return true;
  }

  /** Where the chunk that is tried next ends; 0 if the line that ends it has not come. */
  #end(text: string): number {
    return text.indexOf("\n", this.#done.length + CHUNK_CHARS[this.#tried]! - 1) + 1;
  }

  #showRest(wanted: Node): void {
    patchChildren(this.element, wanted, this.#nodes);
  }
}

function plain(text: string): Node {
  const out = document.createDocumentFragment();
  if (text !== "") out.append(text);
  return out;
}
