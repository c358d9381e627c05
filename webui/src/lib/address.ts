// The page's addresses: `#/` is a new chat, `#/chat/ID` a stored one. The server serves one page for all of them.

const CHAT = /^#\/chat\/([\w-]+)$/;

/** The chat that an address names; null if it names none. */
export function chatOf(hash: string): string | null {
  return CHAT.exec(hash)?.[1] ?? null;
}

export function addressOf(chat: string | null): string {
  return chat === null ? "#/" : `#/chat/${chat}`;
}

/** Makes an address the current one. Back returns to the one before, if that was an address of this page. */
export function visit(address: string): void {
  const from = location.hash || "#/";
  if (from === address) return;
  if (from === "#/" || chatOf(from) !== null) history.pushState(null, "", address);
  else replaceAddress(address);
}

/** Makes an address the current one, in place of the one before. */
export function replaceAddress(address: string): void {
  history.replaceState(null, "", address);
}
