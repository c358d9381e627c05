// Where the keyboard focus goes when the element that had it is gone. Left alone, it falls to the body: the next Tab
// starts at the top of the page, and a screen reader says nothing.

import { tick } from "svelte";
import { addressOf } from "../lib/address";
import { isTouch } from "./screen";

/** The message field; on a touch screen, where it would open the keyboard, the main region. */
export function focusHome(): void {
  document.querySelector<HTMLElement>(isTouch() ? "main" : "#message")?.focus({ preventScroll: true });
}

/** Focuses the first of these elements that takes the focus after the page has been updated, else `focusHome`. */
export async function focusFirst(...candidates: (() => Element | null | undefined)[]): Promise<void> {
  await tick();
  for (const candidate of candidates) {
    const element = candidate();
    if (!(element instanceof HTMLElement) || element === document.body) continue;
    element.focus();
    if (document.activeElement === element) return;
  }
  focusHome();
}

/** Focuses home if nothing has the focus after the page has been updated. */
export async function keepFocus(): Promise<void> {
  await tick();
  if (document.activeElement === document.body || document.activeElement === null) focusHome();
}

/** The link of a chat in the list, if it is mounted. */
export function chatLink(id: string): Element | null {
  return document.querySelector(`nav a[href="${addressOf(id)}"]`);
}
