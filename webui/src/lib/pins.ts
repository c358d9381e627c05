// /v1/sessions as pins: a session keeps the keys and values of the messages that its last request sent.

import { call } from "./api";

export interface Pin {
  id: string;
  num_tokens: number;
  num_pinned_tokens: number;
}

/** The name of the session that pins the messages up to this one. */
export function pinName(message: string): string {
  return `web-${message.replace(/[^\w.-]/g, "_").slice(0, 60)}`;
}

const at = (path: string, model: string) => `/v1/sessions${path}?model=${encodeURIComponent(model)}`;

/** The pins of this page and key. Throws ApiError. */
export async function listPins(model: string, key: string): Promise<Pin[]> {
  const { data } = (await (await call(at("", model), key, {})).json()) as { data: Pin[] };
  return data.filter(({ id }) => id.startsWith("web-"));
}

/** Sends the messages once more, with one token to generate, in the session of this name. Throws ApiError. */
export async function pin(name: string, body: Record<string, unknown>, key: string): Promise<void> {
  await call("/v1/chat/completions", key, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, session_id: name, max_tokens: 1 }),
  });
}

/** Throws ApiError. */
export async function unpin(name: string, model: string, key: string): Promise<void> {
  await call(at(`/${name}`, model), key, { method: "DELETE" });
}
