// Titles that the model writes, if the user wants them: after the first answer of a chat whose name is not the user's own.

import { ApiError, streamChat } from "../lib/api";
import { wireMessages } from "../lib/context";
import { splitReasoning } from "../lib/reasoning";
import { cleanTitle } from "../lib/title";
import type { Message } from "../lib/types";
import type { Conversation } from "./conversation.svelte";
import { library } from "./library.svelte";
import { settings } from "./look.svelte";
import { server } from "./server.svelte";
import { t } from "./ui.svelte";

const LIMIT_MS = 60_000;
const TOKENS_MAX = 40;

/** Asks for a title after the messages so far, whose keys and values the server has. A failure leaves the title as it is. */
export async function titleByModel(conversation: Conversation, answer: Message): Promise<void> {
  const { session, path } = conversation;
  if (!settings.kept.modelTitles || !session || session.renamed || path.length !== 2) return;
  if (answer.end !== "stop" && answer.end !== "length") return;
  const instruction: Message = {
    id: "",
    parent: answer.id,
    role: "user",
    content: t("title_prompt"),
    createdMs: 0,
  };
  const body = {
    ...(answer.model ? { model: answer.model } : {}),
    messages: wireMessages(conversation.settings, [...path, instruction]),
    temperature: 0,
    max_tokens: TOKENS_MAX,
    chat_template_kwargs: { enable_thinking: false },
  };
  let text = "";
  try {
    for await (const piece of streamChat(body, server.key, AbortSignal.timeout(LIMIT_MS))) {
      if (piece.kind === "text") text += piece.text;
    }
  } catch (error) {
    if (error instanceof ApiError || error instanceof DOMException) return;
    throw error;
  }
  const title = titleIn(text);
  const now = library.get(session.id);
  if (title !== "" && now && !now.renamed && now.title === session.title) {
    library.change(session.id, { title });
  }
}

/** The first line without quotation marks and "Title:"; "" if there is none. */
function titleIn(text: string): string {
  const { answer } = splitReasoning(text);
  const line = answer.split("\n").find((one) => /[\p{L}\p{N}]/u.test(one)) ?? "";
  return cleanTitle(
    line.replace(/^[#*\s]*(?:title|标题)\s*[:：]\s*/i, "").replace(/^["'“「*#\s]+|["'”」*.\s]+$/g, ""),
  );
}
