// Two copies of one session that changed apart: nothing that was said is lost.

import type { Whole } from "./transfer";
import type { Message } from "./types";

/**
 * The messages of both; of a message that both have, the finished one, else the longer one. Name, folder, draft and
 * the chosen path are those of the copy that was changed later.
 */
export function merge(a: Whole, b: Whole): Whole {
  const messages = new Map(a.messages.map((message) => [message.id, message]));
  for (const message of b.messages) {
    const known = messages.get(message.id);
    messages.set(message.id, known ? fuller(known, message) : message);
  }
  const session = a.session.changedMs >= b.session.changedMs ? a.session : b.session;
  return { session, messages: [...messages.values()] };
}

function fuller(a: Message, b: Message): Message {
  const [isOpenA, isOpenB] = [a.end === "running", b.end === "running"];
  if (isOpenA !== isOpenB) return isOpenA ? b : a;
  return b.content.length > a.content.length ? b : a;
}
