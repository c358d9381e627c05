/** Too narrow for the session list beside the conversation: it is a drawer then. The same width is in the styles. */
export function isNarrow(): boolean {
  return matchMedia("(max-width: 56rem)").matches;
}
