// The keyboard shortcuts, as the help sheet lists them. Those with an `action` work everywhere on the page.

import type { Key } from "./i18n";

export type Action =
  | "new"
  | "search"
  | "find"
  | "sidebar"
  | "settings"
  | "status"
  | "help"
  | "attach"
  | "compare"
  | "map"
  | "regenerate"
  | "copy"
  | "previous"
  | "next"
  | "stop";

interface Shortcut {
  keys: readonly string[];
  does: Key;
  action?: Action;
}

export const SHORTCUTS: readonly Shortcut[] = [
  { keys: ["Ctrl", "Shift", "O"], does: "new_chat", action: "new" },
  { keys: ["Ctrl", "K"], does: "search", action: "search" },
  { keys: ["Ctrl", "F"], does: "find", action: "find" },
  { keys: ["Ctrl", "U"], does: "attach", action: "attach" },
  { keys: ["Ctrl", "Shift", "Enter"], does: "regenerate_last", action: "regenerate" },
  { keys: ["Ctrl", "Shift", "C"], does: "copy_last", action: "copy" },
  { keys: ["Ctrl", "Shift", "M"], does: "compare", action: "compare" },
  { keys: ["Ctrl", "Shift", "L"], does: "branch_map", action: "map" },
  { keys: ["Alt", "↑"], does: "chat_previous", action: "previous" },
  { keys: ["Alt", "↓"], does: "chat_next", action: "next" },
  { keys: ["Ctrl", "B"], does: "sidebar", action: "sidebar" },
  { keys: ["Ctrl", "."], does: "status", action: "status" },
  { keys: ["Ctrl", ","], does: "settings", action: "settings" },
  { keys: ["Ctrl", "/"], does: "shortcuts", action: "help" },
  { keys: ["Esc"], does: "close_or_stop", action: "stop" },
  { keys: ["Enter"], does: "send" },
  { keys: ["Shift", "Enter"], does: "new_line" },
  { keys: ["Ctrl", "Enter"], does: "send_or_save" },
  { keys: ["Shift", "Enter"], does: "find_previous" },
  { keys: ["↑"], does: "edit_last" },
  { keys: ["↑ ↓"], does: "move_in_list" },
  { keys: ["Home / End"], does: "move_to_edge" },
];

// Names of keys as the sheet shows them.
const SHOWN: Readonly<Record<string, string>> = { ArrowUp: "↑", ArrowDown: "↓" };

type Pressed = Pick<KeyboardEvent, "key" | "ctrlKey" | "metaKey" | "shiftKey" | "altKey">;

/** What a key press asks for, null if it is none of the page's shortcuts. Ctrl is also the Mac's Command. */
export function actionOf(event: Pressed): Action | null {
  if (event.key === "Escape") return event.altKey ? null : "stop";
  const pressed = [
    ...(event.ctrlKey || event.metaKey ? ["Ctrl"] : []),
    ...(event.altKey ? ["Alt"] : []),
    ...(event.shiftKey ? ["Shift"] : []),
    SHOWN[event.key] ?? (event.key.length === 1 ? event.key.toUpperCase() : event.key),
  ].join("+");
  return SHORTCUTS.find(({ keys, action }) => action && keys.join("+") === pressed)?.action ?? null;
}
