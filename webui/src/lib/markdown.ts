// Markdown to markup, block by block, so that a growing answer costs its last block only. `draw.ts` sanitizes it.

import MarkdownIt, { type Env, type Token } from "markdown-it";
import { markRules } from "./markrules";
import { mathRules } from "./mathrules";

/** A block of the outermost level, as markup. */
export interface Block {
  /** All of it; of a list or table without its items. */
  shell: string;
  /** The items of a list, the rows of a table: they belong into the first `ul`, `ol` or `tbody` of the shell. */
  items: string[];
}

export interface Labels {
  copy: string;
  image: string;
}

const md = new MarkdownIt({ html: false, linkify: true, breaks: false });
md.use(mathRules);
md.use(markRules);
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
// Wide tables scroll in a box of their own; alignment is a class because the policy refuses `style`.
rules.table_open = () => '<div class="table" tabindex="0"><table>';
// The body is there before its first row, so that a growing table only gets rows.
rules.thead_close = () => "</thead><tbody>";
rules.tbody_open = rules.tbody_close = () => "";
rules.table_close = () => "</tbody></table></div>\n";
rules.th_open = (tokens, i) => cell("th", tokens[i]!);
rules.td_open = (tokens, i) => cell("td", tokens[i]!);
rules.fence = (tokens, i, _options, env) => codeBlock(tokens[i]!, labelsOf(env));
rules.code_block = (tokens, i, _options, env) => codeBlock(tokens[i]!, labelsOf(env));

// A longer paragraph becomes several: a text without line breaks must not be parsed and laid out whole with each piece.
const PARAGRAPH_CHARS_MAX = 8_000;

const LINE_END = /\r\n?|\n/g;

/** The labels that `Blocks` puts into the renderer's environment. */
function labelsOf(env: Env | undefined): Labels {
  return env as Env & Labels;
}

/**
 * Gives headings the tags of their depth. The page has its own headings above: an answer's begin at the third level, and
 * none skips a level. `open`: the levels, as written, of the headings that the first token is under; returns those after
 * the last.
 */
function nestHeadings(tokens: readonly Token[], open: readonly number[]): readonly number[] {
  for (const token of tokens) {
    if (token.type === "heading_open") {
      const written = Number(token.tag[1]);
      open = [...open.filter((level) => level < written), written];
    }
    if (token.type.startsWith("heading_")) token.tag = `h${Math.min(6, 2 + open.length)}`;
  }
  return open;
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
  #blocks: Block[] = [];
  /** How many blocks take no more text, and where the next one begins, in characters. */
  #finished = 0;
  #from = 0;
  #references: NonNullable<Env["references"]> = {};
  /** The levels of the headings that the last block is under. */
  #levels: readonly number[] = [];

  /**
   * The blocks of the text so far. Text that goes on from the last update's costs the last block only. A
   * whole text is parsed at once if links in it may refer to lines that came after them.
   */
  update(text: string, isWhole: boolean, labels: Labels): Block[] {
    if (text === this.#text && isWhole === this.#isWhole && labels === this.#labels) return this.#blocks;
    const goesOn = text.startsWith(this.#text) && labels === this.#labels;
    if (!goesOn || (isWhole && /^ {0,3}\[[^\]]+\]:/m.test(text))) {
      this.#finished = 0;
      this.#from = 0;
      this.#references = {};
      this.#levels = [];
    }
    this.#text = text;
    this.#labels = labels;
    this.#isWhole = isWhole;
    const rest = text.slice(this.#from);
    const env = { ...labels, references: this.#references };
    const groups = parts(rest, env);
    const before = groups.slice(0, -1);
    const levels = before.reduce((open, { tokens }) => nestHeadings(tokens, open), this.#levels);
    nestHeadings(groups.at(-1)?.tokens ?? [], levels);
    const parsed = groups.map(({ tokens }) => blockOf(tokens, env));
    this.#blocks = [...this.#blocks.slice(0, this.#finished), ...parsed];
    if (groups.length > 1) {
      this.#finished = this.#blocks.length - 1;
      this.#from += groups.at(-1)!.start;
      this.#levels = levels;
    }
    return this.#blocks;
  }
}

function blockOf(tokens: Token[], env: Env): Block {
  const render = (part: Token[]) => md.renderer.render(part, md.options, env);
  const type = tokens[0]!.type;
  const isTable = type === "table_open";
  if (!isTable && !type.endsWith("_list_open")) return { shell: render(tokens), items: [] };
  const start = isTable ? tokens.findIndex((token) => token.type === "thead_close") + 1 : 1;
  const inside = tokens.slice(start, -1).filter((token) => !token.type.startsWith("tbody_"));
  return {
    shell: render([...tokens.slice(0, start), tokens.at(-1)!]),
    items: topLevel(inside).map(({ tokens: item }) => render(item).trim()),
  };
}

interface Group {
  tokens: Token[];
  /** Where it begins, in characters. */
  start: number;
}

/** The blocks of the outermost level. */
function parts(text: string, env: Env): Group[] {
  const groups = topLevel(md.parse(text, env), text);
  return groups.flatMap((group, i) => {
    const end = groups[i + 1]?.start ?? text.length;
    if (group.tokens[0]!.type !== "paragraph_open" || end - group.start <= PARAGRAPH_CHARS_MAX)
      return [group];
    return pieces(text, group.start, end).flatMap(([from, to]) => {
      const piece = text.slice(from, to);
      return topLevel(md.parse(piece, env), piece).map(({ tokens, start }) => ({
        tokens,
        start: from + start,
      }));
    });
  });
}

/** The ranges of a long paragraph. Each begins with a space or line break, if there is one, and can be found again. */
function pieces(text: string, start: number, end: number): [number, number][] {
  const out: [number, number][] = [];
  let from = start;
  while (end - from > PARAGRAPH_CHARS_MAX) {
    const latest = from + PARAGRAPH_CHARS_MAX;
    const space = Math.max(text.lastIndexOf(" ", latest), text.lastIndexOf("\n", latest));
    const to = space > from ? space : latest;
    out.push([from, to]);
    from = to;
  }
  out.push([from, end]);
  return out;
}

/** The tokens of each block of the outermost level of a text. */
function topLevel(tokens: Token[], text = ""): Group[] {
  const groups: Group[] = [];
  let depth = 0;
  let line = 0;
  let start = 0;
  for (const token of tokens) {
    if (depth === 0) {
      for (const first = token.map?.[0] ?? line; line < first; line++) start = nextLine(text, start);
      groups.push({ tokens: [], start });
    }
    groups.at(-1)!.tokens.push(token);
    depth += token.nesting;
  }
  return groups;
}

/** Where the line after the one at `from` begins. The parser takes each of \r\n, \r and \n as a line's end. */
function nextLine(text: string, from: number): number {
  LINE_END.lastIndex = from;
  return LINE_END.exec(text) ? LINE_END.lastIndex : text.length;
}
