// Shows the markup of a block of Markdown. A growing block is updated, not rebuilt. Code gets its colors and formulas
// their typesetting, also while the block grows; both libraries are loaded when the first block needs them.

import { CodePainter } from "./codepainter";
import type highlighter from "./highlighter";
import type { typeset } from "./katex";
import type { Block } from "./markdown";
import { patchChildren } from "./patch";
import { prose } from "./sanitize";

// A longer formula stays TeX. Within a line it is hardly a formula, but text between two dollar signs.
const TEX_CHARS_MAX = { displayed: 5_000, inline: 1_000 };
// Typeset formulas are kept by their source: text that grows may move a formula to another element.
const FORMULAS_KEPT = 200;
// Of a frame: an old chat with much code and many formulas is finished over several frames.
const BUDGET_MS = 8;

// The elements that are filled here. In the renderer's markup they hold their source.
const LEAVES = "button.copy, pre > code, .maths";
interface Leaf {
  source: string;
  className: string;
  painter: CodePainter | null;
}
const LIST = "tbody, ul, ol";
const drawn = new WeakMap<HTMLElement, Block>();
const leaves = new WeakMap<HTMLElement, Leaf>();
const waiting = new Set<HTMLElement>();
let isAsked = false;
let colors: typeof highlighter | null = null;
let formulas: typeof typeset | null = null;

/** Makes an element show this block, which is sanitized here. Only what has changed is drawn. */
export function draw(element: HTMLElement, block: Block): void {
  const before = drawn.get(element);
  drawn.set(element, block);
  const isSameShell = block.shell === before?.shell;
  const filled = before?.items.length ? element.querySelector(LIST) : null;
  if (!isSameShell) {
    const hasItems = block.items.length > 0;
    patchChildren(element, prose(block.shell), 0, (have, wanted) =>
      have === filled ? hasItems : isLeaf(have, wanted),
    );
  }
  const list = element.querySelector(LIST);
  if (list !== null && (isSameShell || block.items.length > 0)) {
    drawItems(list, list === filled ? before!.items : [], block.items);
  }
  for (const found of element.querySelectorAll<HTMLElement>(LEAVES)) {
    if (leaves.has(found)) continue;
    leaves.set(found, { source: found.textContent ?? "", className: found.className, painter: null });
    if (found.localName !== "button") later(found);
  }
}

function drawItems(list: Element, before: readonly string[], items: readonly string[]): void {
  let kept = 0;
  while (kept < items.length && items[kept] === before[kept]) kept++;
  if (kept === items.length && kept === before.length) return;
  const [open, close] =
    list.localName === "tbody" ? ["<table><tbody>", "</tbody></table>"] : ["<ul>", "</ul>"];
  const wanted = prose(open + items.slice(kept).join("") + close).querySelector(LIST);
  if (wanted) patchChildren(list, wanted, kept, isLeaf);
}

function isLeaf(have: HTMLElement, wanted: HTMLElement): boolean {
  const leaf = leaves.get(have);
  if (leaf) update(have, leaf, wanted.textContent ?? "");
  return leaf !== undefined;
}

function update(element: HTMLElement, leaf: Leaf, source: string): void {
  if (leaf.source === source && leaf.className === element.className) return;
  leaf.source = source;
  leaf.className = element.className;
  later(element);
}

/** Finishes an element before the next frame. */
function later(element: HTMLElement): void {
  waiting.add(element);
  if (isAsked) return;
  isAsked = true;
  queueMicrotask(finishWaiting);
}

function finishWaiting(): void {
  isAsked = false;
  const deadlineMs = performance.now() + BUDGET_MS;
  for (const element of [...waiting]) {
    if (finish(element, leaves.get(element)!, deadlineMs)) waiting.delete(element);
  }
  if (waiting.size === 0) return;
  isAsked = true;
  requestAnimationFrame(finishWaiting);
}

/** False if the deadline (`performance.now`) came first. */
function finish(element: HTMLElement, leaf: Leaf, deadlineMs: number): boolean {
  if (element.localName === "code") return finishCode(element, leaf, deadlineMs);
  if (element.localName === "button") element.textContent = leaf.source;
  else if (performance.now() > deadlineMs) return false;
  else finishFormula(element, leaf.source);
  return true;
}

function finishCode(element: HTMLElement, leaf: Leaf, deadlineMs: number): boolean {
  const language = leaf.className.slice("language-".length).toLowerCase();
  if (language !== "" && colors === null) {
    void import("./highlighter").then((loaded) => {
      colors = loaded.default;
      later(element);
    }, stayPlain);
  }
  leaf.painter ??= new CodePainter(element);
  const known = colors?.getLanguage(language) ? colors : null;
  return leaf.painter.paint(leaf.source, language, known, deadlineMs);
}

function finishFormula(element: HTMLElement, tex: string): void {
  if (formulas === null) {
    void import("./katex").then((loaded) => {
      formulas = cached(loaded.typeset);
      later(element);
    }, stayPlain);
  }
  element.replaceChildren(formulas?.(tex, element.classList.contains("display")) ?? tex);
}

/** `typeset` with the formulas of before; a formula that is too long is null, like TeX with an error. */
function cached(make: typeof typeset): typeof typeset {
  const made = new Map<string, DocumentFragment | null>();
  return (tex, isDisplayed) => {
    if (tex.length > TEX_CHARS_MAX[isDisplayed ? "displayed" : "inline"]) return null;
    const key = `${isDisplayed} ${tex}`;
    const known = made.get(key);
    const formula = known === undefined ? make(tex, isDisplayed) : known;
    made.delete(key); // the least recently used one is the first
    made.set(key, formula);
    if (made.size > FORMULAS_KEPT) made.delete(made.keys().next().value!);
    return (formula?.cloneNode(true) ?? null) as DocumentFragment | null;
  };
}

/** A library that could not be loaded is asked for again with the next block. */
function stayPlain(): void {}
