// The rows of the session list: pinned ones, then folders, then the rest by age.

import type { Session } from "./types";

export type Age = "today" | "yesterday" | "week" | "month" | "older";
export type Row =
  | {
      kind: "heading";
      key: string;
      section: "pinned" | "folder" | Age;
      name: string;
      n: number;
      open: boolean;
    }
  | { kind: "session"; key: string; session: Session };

const DAY_MS = 86_400_000;

export function ageOf(thenMs: number, nowMs: number): Age {
  const midnight = new Date(nowMs).setHours(0, 0, 0, 0);
  if (thenMs >= midnight) return "today";
  if (thenMs >= midnight - DAY_MS) return "yesterday";
  if (thenMs >= midnight - 7 * DAY_MS) return "week";
  return thenMs >= midnight - 30 * DAY_MS ? "month" : "older";
}

/** Newest first in each group. `closed`: the keys of headings that are folded. */
export function listRows(sessions: readonly Session[], nowMs: number, closed: ReadonlySet<string>): Row[] {
  const sorted = [...sessions].sort((a, b) => b.updatedMs - a.updatedMs);
  const groups = new Map<string, { section: "pinned" | "folder" | Age; name: string; of: Session[] }>();
  const put = (key: string, section: "pinned" | "folder" | Age, name: string, session: Session) => {
    const group = groups.get(key) ?? { section, name, of: [] };
    group.of.push(session);
    groups.set(key, group);
  };
  for (const session of sorted) if (session.pinned) put("pinned", "pinned", "", session);
  const folders = [...new Set(sorted.map((session) => session.folder))].filter(Boolean);
  for (const folder of folders.sort((a, b) => a.localeCompare(b))) {
    for (const session of sorted) {
      if (session.folder === folder && !session.pinned) put(`folder:${folder}`, "folder", folder, session);
    }
  }
  for (const session of sorted) {
    if (session.pinned || session.folder) continue;
    const age = ageOf(session.updatedMs, nowMs);
    put(age, age, "", session);
  }
  const rows: Row[] = [];
  for (const [key, { section, name, of }] of groups) {
    const open = !closed.has(key);
    rows.push({ kind: "heading", key, section, name, n: of.length, open });
    if (open) rows.push(...of.map((session): Row => ({ kind: "session", key: session.id, session })));
  }
  return rows;
}
