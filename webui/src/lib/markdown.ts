// Markdown to sanitised HTML, block by block, so that a growing answer costs its last block only.

import MarkdownIt, { type Env, type Token } from "markdown-it";
import { mathRules } from "./mathrules";
import { prose } from "./sanitise";

export interface Block {
  /** Sanitised; a TrustedHTML where the browser has them. */
  html: string;
  /** No more text will come into it: it may be highlighted and its maths set. */
  settled: boolean;
}

export interface Labels {
  copy: string;
  image: string;
}

const md = new MarkdownIt({ html: false, linkify: true, breaks: false });
md.use(mathRules);
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
md.validateLink = (url) => /^(?:https?:|mailto:|data:image\/(?:png|gif|jpeg|webp);base64,)/i.test(url.trim());

const rules = md.renderer.rules;
const escape = md.utils.escapeHtml;

rules.link_open = (tokens, i, options, _env, self) => {
  tokens[i]!.attrSet("target", "_blank");
  tokens[i]!.attrSet("rel", "noopener noreferrer nofollow");
  return self.renderToken(tokens, i, options);
};
// An image of another host would tell it who reads: only those inside the text are shown, others become links.
rules.image = (tokens, i, _options, env) => {
  const token = tokens[i]!;
  const url = String(token.attrGet("src") ?? "");
  const alt = token.content || labelsOf(env).image;
  if (url.startsWith("data:")) return `<img src="${escape(url)}" alt="${escape(alt)}">`;
  const rel = 'target="_blank" rel="noopener noreferrer nofollow"';
  return `<a class="image" href="${escape(url)}" ${rel}>${escape(alt)}</a>`;
};
// The page has its own headings above: an answer's begin at the third level.
rules.heading_open = (tokens, i) => `<h${headingLevel(tokens[i]!)}>`;
rules.heading_close = (tokens, i) => `</h${headingLevel(tokens[i]!)}>\n`;
// Wide tables scroll in a box of their own; alignment is a class because the policy refuses `style`.
rules.table_open = () => '<div class="table" tabindex="0"><table>';
rules.table_close = () => "</table></div>\n";
rules.th_open = (tokens, i) => cell("th", tokens[i]!);
rules.td_open = (tokens, i) => cell("td", tokens[i]!);
rules.fence = (tokens, i, _options, env) => codeBlock(tokens[i]!, labelsOf(env));
rules.code_block = (tokens, i, _options, env) => codeBlock(tokens[i]!, labelsOf(env));

/** The labels that `Blocks` puts into the renderer's environment. */
function labelsOf(env: Env | undefined): Labels {
  return env as Env & Labels;
}

function headingLevel(token: Token): number {
  return Math.min(6, Number(token.tag[1]) + 2);
}

function cell(tag: string, token: Token): string {
  const side = /text-align:(left|center|right)/.exec(String(token.attrGet("style")))?.[1];
  return side ? `<${tag} class="${side}">` : `<${tag}>`;
}

function codeBlock(token: Token, labels: Labels): string {
  const language = /^[\w+#.-]{1,20}/.exec(token.info.trim())?.[0] ?? "";
  const copy = `<button type="button" class="copy">${escape(labels.copy)}</button>`;
  const head = `<div class="code-head"><span>${escape(language)}</span>${copy}</div>`;
  const text = escape(token.content.replace(/\n$/, ""));
  return `<div class="code">${head}<pre tabindex="0"><code class="language-${escape(language)}">${text}</code></pre></div>\n`;
}

/** One answer's blocks, kept between updates. */
export class Blocks {
  #text = "";
  #labels: Labels | null = null;
  #isWhole = false;
  #settled: Block[] = [];
  /** Where the last block begins, in characters. */
  #from = 0;
  #references: NonNullable<Env["references"]> = {};

  /** The blocks of the text so far. Text that goes on from the last update's costs the last block only. */
  update(text: string, isWhole: boolean, labels: Labels): Block[] {
    const goesOn = text.startsWith(this.#text) && labels === this.#labels && !this.#isWhole;
    // A whole text is parsed at once: links may refer to lines that came after them.
    const needsAll = isWhole && /^ {0,3}\[[^\]]+\]:/m.test(text);
    if (!goesOn || needsAll) {
      this.#settled = [];
      this.#from = 0;
      this.#references = {};
    }
    this.#text = text;
    this.#labels = labels;
    this.#isWhole = isWhole;
    const rest = text.slice(this.#from);
    const env = { ...labels, references: this.#references };
    const groups = topLevel(md.parse(rest, env));
    const lastStart = groups.at(-1)?.startLine ?? 0;
    const rendered = groups.map(({ tokens }, i) => ({
      html: prose(md.renderer.render(tokens, md.options, env)),
      settled: isWhole || i < groups.length - 1,
    }));
    const out = [...this.#settled, ...rendered];
    if (!isWhole && groups.length > 1) {
      this.#settled = out.slice(0, -1);
      this.#from += lineOffset(rest, lastStart);
    }
    return out;
  }
}

/** The tokens of each block of the outermost level, with the line on which it begins. */
function topLevel(tokens: Token[]): { tokens: Token[]; startLine: number }[] {
  const groups: { tokens: Token[]; startLine: number }[] = [];
  let depth = 0;
  for (const token of tokens) {
    if (depth === 0) groups.push({ tokens: [], startLine: token.map?.[0] ?? 0 });
    groups.at(-1)!.tokens.push(token);
    depth += token.nesting;
  }
  return groups;
}

function lineOffset(text: string, line: number): number {
  let at = 0;
  for (let i = 0; i < line; i++) at = text.indexOf("\n", at) + 1;
  return at;
}
