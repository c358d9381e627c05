// Task lists (`- [x] done`) and `<br>`, the one tag that models write into table cells. All other HTML is text.

import type { MarkdownIt, StateCore, StateInline } from "markdown-it";

const BOX = /^\[([ xX])\][ \t]+(?=\S)/;

function tasks(state: StateCore): void {
  state.tokens.forEach((inline, i) => {
    const [item, paragraph] = [state.tokens[i - 2], state.tokens[i - 1]];
    if (inline.type !== "inline" || paragraph?.type !== "paragraph_open") return;
    const first = inline.children?.[0];
    const box = first?.type === "text" ? BOX.exec(first.content) : null;
    if (item?.type !== "list_item_open" || !first || !box) return;
    first.content = first.content.slice(box[0].length);
    item.attrJoin("class", "task");
    const open = new state.Token("task_open", "label", 1);
    open.meta = { isDone: box[1] !== " " };
    inline.children = [open, ...inline.children!, new state.Token("task_close", "label", -1)];
  });
}

function lineBreak(state: StateInline, silent: boolean): boolean {
  const tag = /^<br\s*\/?>/i.exec(state.src.slice(state.pos, state.pos + 12));
  if (tag === null) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += tag[0].length;
  return true;
}

/** A markdown-it plugin. */
export function markRules(md: MarkdownIt): void {
  md.core.ruler.after("inline", "tasks", tasks);
  md.inline.ruler.before("autolink", "line_break", lineBreak);
  md.renderer.rules.task_open = (tokens, i) => {
    const { isDone } = tokens[i]!.meta as { isDone: boolean };
    return `<label><input type="checkbox" disabled${isDone ? " checked" : ""}>`;
  };
}
