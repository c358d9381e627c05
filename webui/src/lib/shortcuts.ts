// The keyboard shortcuts: what the help sheet lists. `action` ones work everywhere on the page.

export type Action = "new" | "search" | "sidebar" | "settings" | "help" | "stop";

export const SHORTCUTS = [
  { keys: ["Ctrl", "Shift", "O"], does: "new_chat" },
  { keys: ["Ctrl", "K"], does: "search" },
  { keys: ["Ctrl", "B"], does: "sidebar" },
  { keys: ["Ctrl", ","], does: "settings" },
  { keys: ["Ctrl", "/"], does: "shortcuts" },
  { keys: ["Esc"], does: "stop_answer" },
  { keys: ["Enter"], does: "send" },
  { keys: ["Shift", "Enter"], does: "new_line" },
  { keys: ["↑"], does: "edit_last" },
  { keys: ["Ctrl", "Enter"], does: "save_edit" },
] as const;

type Pressed = Pick<KeyboardEvent, "key" | "ctrlKey" | "metaKey" | "shiftKey" | "altKey">;

/** What a key press asks for, null if it is none of the page's shortcuts. */
export function actionOf(event: Pressed): Action | null {
  if (event.altKey) return null;
  if (event.key === "Escape") return "stop";
  if (!event.ctrlKey && !event.metaKey) return null;
  const key = event.key.toLowerCase();
  if (event.shiftKey) return key === "o" ? "new" : null;
  const actions: Record<string, Action> = { k: "search", b: "sidebar", ",": "settings", "/": "help" };
  return actions[key] ?? null;
}
