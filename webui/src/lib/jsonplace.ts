// Where a text stops being JSON. The errors of JSON.parse have a place in some browsers and for some mistakes only.

const SPACE = /[ \t\n\r]*/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[\da-fA-F]{4}))*"/y;
const SCALAR = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null/y;

/** The line and column, from 1, of the first mistake; null if the text is JSON. */
export function mistakeIn(text: string): { line: number; column: number } | null {
  try {
    JSON.parse(text);
    return null;
  } catch {
    const lines = text.slice(0, stopOf(text)).split("\n");
    return { line: lines.length, column: lines.at(-1)!.length + 1 };
  }
}

/** How much of a text is the beginning of JSON, up to its last whole string, number or sign. */
function stopOf(text: string): number {
  const open: string[] = [];
  let wants: "value" | "key" | "colon" | "more" = "value";
  let isFirst = false; // after an opening bracket, which may be closed at once
  let i = 0;
  const take = (pattern: RegExp) => {
    pattern.lastIndex = i;
    const found = pattern.exec(text);
    i += found?.[0].length ?? 0;
    return found !== null;
  };
  for (;;) {
    take(SPACE);
    const sign = text[i] ?? "";
    const inObject = open.at(-1) === "{";
    if ((isFirst || wants === "more") && open.length > 0 && sign === (inObject ? "}" : "]")) {
      open.pop();
      wants = "more";
    } else if (wants === "more" && open.length > 0 && sign === ",") wants = inObject ? "key" : "value";
    else if (wants === "colon" && sign === ":") wants = "value";
    else if (wants === "value" && (sign === "{" || sign === "[")) {
      open.push(sign);
      wants = sign === "{" ? "key" : "value";
      isFirst = true;
      i++;
      continue;
    } else if (wants === "key" && take(STRING)) {
      wants = "colon";
      isFirst = false;
      continue;
    } else if (wants === "value" && (take(STRING) || take(SCALAR))) {
      wants = "more";
      isFirst = false;
      continue;
    } else return i;
    isFirst = false;
    i++;
  }
}
