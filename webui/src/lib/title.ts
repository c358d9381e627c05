const CHARS_MAX = 60;
// Characters that turn the direction of what stands around them, and other controls: they have no place in a name.
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** A name for a session or folder: one line without controls, at most 60 characters. May be "". */
export function cleanTitle(text: string): string {
  const line = text.replace(/\s+/g, " ").replace(CONTROLS, "").trim();
  const chars = [...line];
  if (chars.length <= CHARS_MAX) return line;
  const cut = chars.slice(0, CHARS_MAX - 1).join("");
  const word = cut.lastIndexOf(" ");
  return `${(word > CHARS_MAX / 2 ? cut.slice(0, word) : cut).trimEnd()}…`;
}

/** The name that a first message gives: its first line with words in it. */
export function titleOf(message: string): string {
  const lines = message.split("\n").map((line) => line.replace(/^[#>*\-\s`]+/, ""));
  return cleanTitle(lines.find((line) => /[\p{L}\p{N}]/u.test(line)) ?? message);
}
