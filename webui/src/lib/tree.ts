// A conversation is a tree of messages with one chosen path. Values are never changed: each function returns a new
// tree that shares what stayed, so that a view redraws only the messages that differ.

import type { Message } from "./types";

export interface Tree {
  readonly messages: ReadonlyMap<string, Message>;
  /** Children in the order in which they were made; the key of the first messages is "". */
  readonly children: ReadonlyMap<string, readonly string[]>;
  /** Where a message has several children: the one on the path. Absent: the newest. */
  readonly chosen: Readonly<Record<string, string>>;
}

export interface Branches {
  ids: readonly string[];
  index: number;
}

export const EMPTY: Tree = { messages: new Map(), children: new Map(), chosen: {} };

/** The tree of stored messages. A message whose parent is not among them is left out, and so are circles. */
export function fromMessages(messages: readonly Message[], chosen: Readonly<Record<string, string>>): Tree {
  const byParent = new Map<string, Message[]>();
  for (const message of messages) {
    const key = message.parent ?? "";
    const siblings = byParent.get(key);
    if (siblings) siblings.push(message);
    else byParent.set(key, [message]);
  }
  const kept = new Map<string, Message>();
  const children = new Map<string, string[]>();
  const open = [""];
  for (let key = open.pop(); key !== undefined; key = open.pop()) {
    const found = (byParent.get(key) ?? []).filter((message) => !kept.has(message.id));
    found.sort((a, b) => a.createdMs - b.createdMs);
    if (found.length > 0) {
      children.set(
        key,
        found.map((message) => message.id),
      );
    }
    for (const message of found) {
      kept.set(message.id, message);
      open.push(message.id);
    }
  }
  return { messages: kept, children, chosen: { ...chosen } };
}

/** The tree with a new message, which is on the path from now on if its parent is. */
export function add(tree: Tree, message: Message): Tree {
  const key = message.parent ?? "";
  const siblings = [...(tree.children.get(key) ?? []), message.id];
  return {
    messages: new Map(tree.messages).set(message.id, message),
    children: new Map(tree.children).set(key, siblings),
    chosen: { ...tree.chosen, [key]: message.id },
  };
}

/** The tree with some fields of one message changed; the same tree if it has no such message. */
export function update(tree: Tree, id: string, fields: Partial<Message>): Tree {
  const message = tree.messages.get(id);
  if (message === undefined) return tree;
  return { ...tree, messages: new Map(tree.messages).set(id, { ...message, ...fields }) };
}

/** The tree without a message and all that follows it, and what was taken out. */
export function remove(tree: Tree, id: string): { tree: Tree; removed: Message[] } {
  const top = tree.messages.get(id);
  if (top === undefined) return { tree, removed: [] };
  const messages = new Map(tree.messages);
  const children = new Map(tree.children);
  const chosen = { ...tree.chosen };
  const removed: Message[] = [];
  const open = [id];
  for (let next = open.pop(); next !== undefined; next = open.pop()) {
    open.push(...(children.get(next) ?? []));
    removed.push(messages.get(next)!);
    messages.delete(next);
    children.delete(next);
    delete chosen[next];
  }
  const key = top.parent ?? "";
  const siblings = tree.children.get(key) ?? [];
  const left = siblings.filter((sibling) => sibling !== id);
  if (left.length > 0) children.set(key, left);
  else children.delete(key);
  if (chosen[key] === id) {
    const neighbor = left[Math.max(0, siblings.indexOf(id) - 1)];
    if (neighbor === undefined) delete chosen[key];
    else chosen[key] = neighbor;
  }
  return { tree: { messages, children, chosen }, removed };
}

/** The chosen messages, first to last. */
export function path(tree: Tree): Message[] {
  const out: Message[] = [];
  for (let key = ""; ;) {
    const siblings = tree.children.get(key);
    if (siblings === undefined) return out;
    const wanted = tree.chosen[key];
    const id = wanted !== undefined && siblings.includes(wanted) ? wanted : siblings[siblings.length - 1]!;
    out.push(tree.messages.get(id)!);
    key = id;
  }
}

/** The messages from the first to this one, whatever is chosen. */
export function pathTo(tree: Tree, id: string): Message[] {
  const out: Message[] = [];
  for (let message = tree.messages.get(id); message; message = tree.messages.get(message.parent ?? "")) {
    out.push(message);
  }
  return out.reverse();
}

/** The messages that stand in one place with this one, itself included. */
export function branches(tree: Tree, message: Message): Branches {
  const ids = tree.children.get(message.parent ?? "") ?? [];
  return { ids, index: ids.indexOf(message.id) };
}

/** The tree whose path goes through this message. */
export function choose(tree: Tree, id: string): Tree {
  const chosen = { ...tree.chosen };
  for (const message of pathTo(tree, id)) chosen[message.parent ?? ""] = message.id;
  return { ...tree, chosen };
}
