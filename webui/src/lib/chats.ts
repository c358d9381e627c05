// /v1/chats: the history on the server, where there is one (`llaisys serve --chat-store FILE`).

import { ApiError, call } from "./api";

export interface Change {
  id: string;
  revision: number;
  deleted: boolean;
}
export interface Changes {
  /** The name of the server's file; null: this server keeps no chats. */
  store: string | null;
  data: Change[];
  has_more: boolean;
}

/** What changed after a revision. Throws ApiError. */
export async function changes(key: string, since: number): Promise<Changes> {
  const answer = await call(`/v1/chats?since=${since}`, key, {});
  return (await answer.json()) as Changes;
}

/** A chat and its revision; null if it is gone. Throws ApiError. */
export async function read(key: string, id: string): Promise<{ revision: number; chat: unknown } | null> {
  return orNull(404, async () => (await call(`/v1/chats/${id}`, key, {})).json());
}

/** The new revision; null if the chat has changed since `base`. `chat` null deletes it. Throws ApiError. */
export async function write(key: string, id: string, base: number, chat: unknown): Promise<number | null> {
  const remove = chat === null;
  const path = remove ? `/v1/chats/${id}?base=${base}` : `/v1/chats/${id}`;
  const options = remove
    ? { method: "DELETE" }
    : {
        method: "PUT",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ base, chat }),
      };
  return orNull(
    409,
    async () => ((await (await call(path, key, options)).json()) as { revision: number }).revision,
  );
}

async function orNull<T>(status: number, work: () => Promise<T>): Promise<T | null> {
  try {
    return await work();
  } catch (error) {
    if (error instanceof ApiError && error.status === status) return null;
    throw error;
  }
}
