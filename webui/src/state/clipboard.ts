// Copies text, also over plain http on another host: there the browser has no `navigator.clipboard`.

import { t, ui } from "./ui.svelte";

/** Copies a text. False if the browser refuses, which a toast says. */
export async function copyText(text: string): Promise<boolean> {
  const isCopied = (await copyByApi(text)) || copyBySelection(text);
  if (!isCopied) ui.toast(t("copy_failed"));
  return isCopied;
}

async function copyByApi(text: string): Promise<boolean> {
  if (!isSecureContext) return false;
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // the permission is denied, or the page lost the focus
  }
}

function copyBySelection(text: string): boolean {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.className = "unseen";
  area.readOnly = true; // a phone shows no keyboard
  area.value = text;
  document.body.append(area);
  area.focus({ preventScroll: true });
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
  return isCopied;
}
