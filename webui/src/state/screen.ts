/** Too narrow for the session list next to the conversation: it is a drawer then. The same width is in the styles. */
export function isNarrow(): boolean {
  return matchMedia("(max-width: 56rem)").matches;
}

/** The main pointer is a finger: there is an on-screen keyboard. */
export function isTouch(): boolean {
  return matchMedia("(pointer: coarse)").matches;
}
