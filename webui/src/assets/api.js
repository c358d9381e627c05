// The only file that talks HTTP. Errors carry the server's own words.

/** An answer that is not a 200, or an error frame inside a stream. `status` is 0 where there was no answer. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Name of the first served model. Throws ApiError. */
export async function firstModel(key) {
  const answer = await call("/v1/models", key, {});
  const list = await answer.json();
  return list.data[0].id;
}

/**
 * Streams one answer. Yields `{text}` for each piece and `{usage}` once at the end; throws ApiError, or what
 * `signal` says when it stops the stream.
 */
export async function* chat(messages, key, signal) {
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  const answer = await call("/v1/chat/completions", key, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of frames(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, answer.status, chunk.error.code);
    const text = chunk.choices[0]?.delta.content;
    if (text) yield { text };
    if (chunk.usage) yield { usage: chunk.usage };
  }
  throw new ApiError("The connection ended before the answer did.", 0, "connection_lost");
}

async function call(path, key, options) {
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0, "unreachable");
  }
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({ error: { message: answer.statusText } }));
  throw new ApiError(error.message, answer.status, error.code);
}

/** The `data:` of each server-sent event; comments are left out. */
async function* frames(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}
