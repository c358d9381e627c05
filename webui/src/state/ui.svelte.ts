// What is open on the screen, and what is said about it.

import { translate, type Key, type Vars } from "../lib/i18n";
import { settings } from "./look.svelte";

export type Dialog = "settings" | "search" | "help" | "compare" | "map" | null;

export interface Toast {
  id: number;
  text: string;
  action: { label: string; run: () => void } | null;
}

const TOAST_MS = 8000;

class Ui {
  dialog = $state<Dialog>(null);
  /** The session list as a drawer, on a narrow screen. */
  drawer = $state(false);
  /** The figures of the server, next to the conversation. */
  panel = $state(false);
  /** The search in the shown chat is open. */
  isFinding = $state(false);
  toasts = $state.raw<readonly Toast[]>([]);
  /** For screen readers: the last event worth saying. */
  announcement = $state("");
  #nextToast = 0;

  /** Says something for a while; `action` is offered next to it. */
  toast(text: string, action: Toast["action"] = null): void {
    const id = this.#nextToast++;
    this.toasts = [...this.toasts, { id, text, action }];
    setTimeout(() => this.dismiss(id), TOAST_MS);
  }

  dismiss(id: number): void {
    this.toasts = this.toasts.filter((toast) => toast.id !== id);
  }

  announce(text: string): void {
    this.announcement = text;
  }
}

export const ui = new Ui();

/** A text of the page in the chosen language. */
export function t(key: Key, vars: Vars = {}): string {
  return translate(settings.kept.language, key, vars);
}
