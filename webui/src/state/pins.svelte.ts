// Branches whose keys and values the server keeps.

import { ApiError } from "../lib/api";
import { sent, wireMessages } from "../lib/context";
import { listPins, pin, pinName, unpin, type Pin } from "../lib/pins";
import { pathTo } from "../lib/tree";
import type { Message } from "../lib/types";
import type { Conversation } from "./conversation.svelte";
import { server } from "./server.svelte";
import { t, ui } from "./ui.svelte";

class Pins {
  /** By the name of their session; null: this server has no sessions, because it caches no prefixes. */
  known = $state.raw<ReadonlyMap<string, Pin> | null>(null);
  /** The message whose branch is being pinned. */
  busy = $state<string | null>(null);

  of(message: string): Pin | undefined {
    return this.known?.get(pinName(message));
  }

  async refresh(conversation: Conversation): Promise<void> {
    const model = modelOf(conversation);
    try {
      this.known = new Map((await listPins(model, server.key)).map((one) => [one.id, one]));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.known = null;
    }
  }

  /** Pins the messages up to an answer, or ends that. */
  async toggle(conversation: Conversation, answer: Message): Promise<void> {
    const model = modelOf(conversation);
    const name = pinName(answer.id);
    this.busy = answer.id;
    try {
      if (this.of(answer.id)) await unpin(name, model, server.key);
      else await pin(name, bodyOf(conversation, answer, model), server.key);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      ui.toast(t("pin_failed", { detail: error.message }));
    } finally {
      this.busy = null;
    }
    await this.refresh(conversation);
  }
}

function modelOf(conversation: Conversation): string {
  return server.model(conversation.settings.model)?.id ?? "";
}

function bodyOf(conversation: Conversation, answer: Message, model: string): Record<string, unknown> {
  const path = sent(pathTo(conversation.tree, answer.id), conversation.session?.contextFrom ?? null);
  return {
    model,
    messages: wireMessages(conversation.settings, path),
    add_generation_prompt: false,
    continue_final_message: true,
  };
}

export const pins = new Pins();
