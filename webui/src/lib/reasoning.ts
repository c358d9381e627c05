// Models that think write `<think>...</think>` before their answer; some templates write the opening tag themselves,
// so that the answer begins inside it.

export interface Parts {
  /** "" is none. */
  reasoning: string;
  answer: string;
  /** The thinking has not ended. */
  thinking: boolean;
}

const OPEN = "<think>";
const CLOSE = "</think>";

/** An answer's reasoning and its text. A tag inside the text is text. */
export function splitReasoning(content: string, reasoning = ""): Parts {
  const start = content.trimStart();
  const opened = start.startsWith(OPEN);
  const body = opened ? start.slice(OPEN.length) : start;
  const end = body.indexOf(CLOSE);
  const closes = end >= 0 && (opened || !body.slice(0, end).includes(OPEN));
  if (closes) {
    const own = body.slice(0, end).trim();
    return {
      reasoning: joined(reasoning, own),
      answer: body.slice(end + CLOSE.length).trimStart(),
      thinking: false,
    };
  }
  if (opened) return { reasoning: joined(reasoning, body.trim()), answer: "", thinking: true };
  // A piece of the tag itself is not shown while the rest may come.
  if (start !== "" && OPEN.startsWith(start)) return { reasoning, answer: "", thinking: true };
  return { reasoning, answer: content, thinking: reasoning !== "" && content === "" };
}

/** A reasoning that was cut and goes on with this piece, which may hold its end. */
export function continueReasoning(reasoning: string, piece: string): Parts {
  const text = reasoning + piece;
  const end = text.indexOf(CLOSE, Math.max(0, reasoning.length - CLOSE.length));
  if (end < 0) return { reasoning: text, answer: "", thinking: true };
  const answer = text.slice(end + CLOSE.length).trimStart();
  return { reasoning: text.slice(0, end).trimEnd(), answer, thinking: false };
}

/** The beginning of an answer for a model that continues this reasoning. */
export const unclosed = (reasoning: string) => `${OPEN}\n${reasoning}`;

function joined(a: string, b: string): string {
  return a && b ? `${a}\n\n${b}` : a || b;
}
