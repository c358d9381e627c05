// Which of the server's requests are of this page: the chat of each.

/** Requests of this page; the oldest are forgotten first, as on the server. */
const KNOWN_MAX = 1024;

/** A cause that another key's request is, and one that a request of this key and not of this page is. */
export const OTHER = "other";
export const UNKNOWN = "";

const chats = new Map<string, string>();

export function noteRequest(id: string, chat: string): void {
  chats.delete(id);
  chats.set(id, chat);
  const oldest = chats.keys().next();
  if (chats.size > KNOWN_MAX && !oldest.done) chats.delete(oldest.value);
}

/** The chat of a request, or `OTHER` or `UNKNOWN`. */
export function chatOfRequest(id: string): string {
  return id === OTHER ? OTHER : (chats.get(id) ?? UNKNOWN);
}
