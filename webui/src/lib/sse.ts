// Server-sent events, as https://html.spec.whatwg.org/multipage/server-sent-events.html defines their lines.
// Only `data` matters here; comments (the server's pings) and other fields are left out.

import { nextTask } from "./task";

const BUSY_MS = 8;

/** Takes text in any cut and gives the data of each whole event. */
export class SseParser {
  #rest = "";
  #data: string[] = [];

  push(text: string): string[] {
    const out: string[] = [];
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop()!;
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length > 0) out.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return out;
  }
}

/**
 * The data of each event of a body, until it ends. An event that is not closed by an empty line is dropped. A stream
 * that always has more would be read without a break: `pause` is awaited every BUSY_MS.
 */
export async function* events(
  body: ReadableStream<Uint8Array>,
  pause: () => Promise<void> = nextTask,
): AsyncGenerator<string> {
  const parser = new SseParser();
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let pausedMs = performance.now();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
      if (performance.now() - pausedMs < BUSY_MS) continue;
      await pause();
      pausedMs = performance.now();
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
