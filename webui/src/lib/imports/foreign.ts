// What the exports of other chat programs have in common: a tree of messages, some of which are not shown. It becomes a
// chat in this page's own form, whose reader checks every field.

export type Json = Record<string, unknown>;

export function isObject(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
export const text = (value: unknown) => (typeof value === "string" ? value : "");
/** Milliseconds of a time in seconds; 0 if it is none. */
export const fromSeconds = (value: unknown) => (typeof value === "number" ? Math.round(value * 1000) : 0);

/** `shown` null: not shown, what follows it hangs on the message before. */
export interface Node {
  id: string;
  parent: string | null;
  shown: Shown | null;
}
export interface Shown extends Json {
  role: string;
  content: string;
}

/** `parent`: the shown message before. `isOnly`: nothing else follows that one. */
interface Visit {
  node: Node;
  parent: string | null;
  isOnly: boolean;
}

/** More messages than a person writes: such a chat is left out. */
const NODES_MAX = 10_000;

/** The chat of a tree whose path ends at `leaf`; null without a message, or with too many. */
export function chatOf(fields: Json, nodes: readonly Node[], leaf: string): Json | null {
  if (nodes.length > NODES_MAX) return null;
  const known = new Map(nodes.map((node) => [node.id, node]));
  const children = new Map<string | null, Node[]>();
  for (const node of known.values()) {
    const parent = node.parent !== null && known.has(node.parent) ? node.parent : null;
    const siblings = children.get(parent);
    if (siblings) siblings.push(node);
    else children.set(parent, [node]);
  }
  const messages = new Map<string, Shown & { id: string; parent: string | null }>();
  const standsFor = new Map<string, string | null>();
  const open: Visit[] = (children.get(null) ?? []).map((node) => ({ node, parent: null, isOnly: false }));
  for (let next = open.pop(); next; next = open.pop()) {
    const { node, parent, isOnly } = next;
    const { id, shown } = node;
    const before = parent === null ? undefined : messages.get(parent);
    let self: string | null = id;
    if (shown === null) self = parent;
    else if (isOnly && isStep(shown, before)) {
      before!.content = [before!.content, shown.content].filter(Boolean).join("\n\n");
      self = parent;
    } else messages.set(id, { ...shown, id, parent, end: shown.role === "assistant" ? "stop" : undefined });
    standsFor.set(id, self);
    const after = children.get(id) ?? [];
    const isOnlyAfter = after.length === 1 && (shown !== null || isOnly);
    for (const child of after) open.push({ node: child, parent: self, isOnly: isOnlyAfter });
  }
  if (messages.size === 0) return null;
  const chosen: Record<string, string> = {};
  for (let at = standsFor.get(leaf) ?? null; at !== null; at = messages.get(at)!.parent) {
    chosen[messages.get(at)!.parent ?? ""] = at;
  }
  return { ...fields, messages: [...messages.values()], chosen };
}

/** An answer in several steps, between which the model used tools, is one answer. */
function isStep(shown: Shown, before: Shown | undefined): boolean {
  return shown.role === "assistant" && before?.role === "assistant";
}
