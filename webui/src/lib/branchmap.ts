// The tree of a conversation as rows with lanes. A chosen message stays in the lane of the one before it; each other
// version gets the next lane and comes before the chosen one.

import type { Tree } from "./tree";
import type { Message } from "./types";

export interface MapRow {
  key: string;
  message: Message;
  lane: number;
  isOnPath: boolean;
  /** Which of the versions it is, from 1, and how many there are. */
  version: number;
  versions: number;
  /** Lines in its lane: from the message before, to the one after; `fork`: from the lane on the left. */
  above: boolean;
  below: boolean;
  fork: boolean;
}

interface Open {
  id: string;
  lane: number;
  isOnPath: boolean;
  isFirst: boolean;
}

/** All messages, first to last. */
export function mapRows(tree: Tree): MapRow[] {
  const rows: MapRow[] = [];
  const open: Open[] = openedBy(tree, "", 0, true);
  for (let next = open.pop(); next; next = open.pop()) {
    const { id, lane, isOnPath, isFirst } = next;
    const message = tree.messages.get(id)!;
    const siblings = tree.children.get(message.parent ?? "") ?? [];
    rows.push({
      key: id,
      message,
      lane,
      isOnPath,
      version: siblings.indexOf(id) + 1,
      versions: siblings.length,
      above: !isFirst && (message.parent !== null || siblings.length > 1),
      below: tree.children.has(id),
      fork: isFirst,
    });
    open.push(...openedBy(tree, id, lane, isOnPath));
  }
  return rows;
}

/** The children of a message in reverse order of their rows. */
function openedBy(tree: Tree, parent: string, lane: number, isOnPath: boolean): Open[] {
  const ids = tree.children.get(parent) ?? [];
  const wanted = tree.chosen[parent];
  const chosen = wanted !== undefined && ids.includes(wanted) ? wanted : ids.at(-1);
  const others = ids.filter((id) => id !== chosen);
  const rows = others.map((id) => ({ id, lane: lane + 1, isOnPath: false, isFirst: true }));
  if (chosen !== undefined) rows.push({ id: chosen, lane, isOnPath, isFirst: false });
  return rows.reverse();
}
