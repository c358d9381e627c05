// What shortcuts do to the shown chat and the list.

import { listRows } from "../lib/groups";
import { splitReasoning } from "../lib/reasoning";
import { copyText } from "./clipboard";
import { library } from "./library.svelte";
import { t, ui } from "./ui.svelte";

function lastAnswer() {
  return library.current?.path.findLast(({ role }) => role === "assistant");
}

/** Asks for another version of the last answer, unless one is being made. */
export function regenerateLast(): void {
  const answer = lastAnswer();
  if (answer && library.current?.running === null) library.current.regenerate(answer);
}

/** Copies the text of the last answer. */
export async function copyLast(): Promise<void> {
  const answer = lastAnswer();
  if (!answer) return;
  const text = splitReasoning(answer.content, answer.reasoning).answer;
  if (text && (await copyText(text))) ui.toast(t("copied"));
}

/** Shows the chat `step` places below the shown one in the list; from a new chat, the first or the last. */
export async function showNeighbor(step: 1 | -1): Promise<void> {
  const rows = listRows([...library.sessions.values()], Date.now(), new Set());
  const ids = rows.flatMap((row) => (row.kind === "session" ? [row.session.id] : []));
  const now = library.current ? ids.indexOf(library.current.id) : step > 0 ? -1 : ids.length;
  const next = ids[now + step];
  if (next !== undefined) await library.show(next);
}
