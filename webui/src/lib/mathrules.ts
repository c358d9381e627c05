// Maths in Markdown: `$x$`, `\(x\)` inline; `$$x$$`, `\[x\]` displayed, also over several lines. The rules only find
// the source; `draw.ts` has it typeset once KaTeX is loaded.

import type { MarkdownIt, StateBlock, StateInline } from "markdown-it";

const INLINE = [
  { open: "$$", close: "$$", display: true },
  { open: "\\[", close: "\\]", display: true },
  { open: "\\(", close: "\\)", display: false },
  { open: "$", close: "$", display: false },
] as const;

function inline(state: StateInline, silent: boolean): boolean {
  const rest = state.src.slice(state.pos, state.posMax);
  const rule = INLINE.find(({ open }) => rest.startsWith(open));
  if (rule === undefined) return false;
  const end = rest.indexOf(rule.close, rule.open.length);
  const tex = rest.slice(rule.open.length, end);
  if (end < 0 || tex.trim() === "") return false;
  // "$5 and $6" are prices: a formula does not begin or end with a space, nor is it followed by a digit.
  if (rule.open === "$" && (/^\s|\s$/.test(tex) || /^\d/.test(rest.slice(end + 1)))) return false;
  if (!silent) state.push(rule.display ? "maths_display" : "maths_inline", "", 0).content = tex.trim();
  state.pos += end + rule.close.length;
  return true;
}

function block(state: StateBlock, startLine: number, endLine: number, silent: boolean): boolean {
  const line = (n: number) => state.src.slice(state.bMarks[n]! + state.tShift[n]!, state.eMarks[n]!);
  const first = line(startLine);
  const rule = INLINE.find(({ open, display }) => display && first.startsWith(open));
  if (rule === undefined || first.slice(rule.open.length).includes(rule.close)) return false;
  const lines = [first.slice(rule.open.length)];
  let next = startLine + 1;
  for (; next < endLine; next++) {
    const text = line(next);
    if (text.trimEnd().endsWith(rule.close)) {
      lines.push(text.trimEnd().slice(0, -rule.close.length));
      if (silent) return true;
      const token = state.push("maths_block", "", 0);
      token.content = lines.join("\n").trim();
      token.map = [startLine, next + 1];
      state.line = next + 1;
      return true;
    }
    lines.push(text);
  }
  return false;
}

/** A markdown-it plugin. */
export function mathRules(md: MarkdownIt): void {
  const escape = md.utils.escapeHtml;
  md.inline.ruler.before("escape", "maths", inline);
  md.block.ruler.before("fence", "maths", block, { alt: ["paragraph", "blockquote", "list"] });
  md.renderer.rules.maths_inline = (tokens, i) => `<span class="maths">${escape(tokens[i]!.content)}</span>`;
  md.renderer.rules.maths_display = (tokens, i) =>
    `<span class="maths display" tabindex="0">${escape(tokens[i]!.content)}</span>`;
  md.renderer.rules.maths_block = (tokens, i) =>
    `<p><span class="maths display" tabindex="0">${escape(tokens[i]!.content)}</span></p>`;
}
