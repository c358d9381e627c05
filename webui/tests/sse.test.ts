import { describe, expect, it, vi } from "vitest";
import { events, SseParser } from "../src/lib/sse";
import { cut, randomOf } from "./random";

const STREAM =
  ': ping\n\ndata: {"a":"天气"}\n\ndata:two\r\n\r\nevent: x\nid: 7\ndata: one\ndata:  more\n\ndata: [DONE]\n\ndata: unfinished';
const DATA = ['{"a":"天气"}', "two", "one\n more", "[DONE]"];

describe("server-sent events", () => {
  it.each([1, 2, 3, 4, 5, 6, 7, 8])("are the same in every cut (seed %i)", (seed) => {
    const random = randomOf(seed);
    const parser = new SseParser();
    expect(cut(STREAM, 1 + random.int(9), random).flatMap((text) => parser.push(text))).toEqual(DATA);
  });

  it("come out of bytes that are cut inside a character", async () => {
    const bytes = new TextEncoder().encode(STREAM);
    const body = new ReadableStream<Uint8Array>({
      start(control) {
        for (const byte of bytes) control.enqueue(new Uint8Array([byte]));
        control.close();
      },
    });
    const out: string[] = [];
    for await (const data of events(body)) out.push(data);
    expect(out).toEqual(DATA);
  });

  it("leave time for others while the stream always has more", async () => {
    vi.useFakeTimers({ toFake: ["performance"] });
    const body = new ReadableStream<Uint8Array>({
      pull: (control) => control.enqueue(new TextEncoder().encode("data: x\n\n")),
    });
    const pause = vi.fn(() => Promise.resolve());
    let n = 0;
    for await (const data of events(body, pause)) {
      expect(data).toBe("x");
      vi.advanceTimersByTime(1);
      if (++n === 33) break;
    }
    expect(pause).toHaveBeenCalledTimes(4);
    vi.useRealTimers();
  });

  it("let go of the body when the reader stops", async () => {
    let isCancelled = false;
    const body = new ReadableStream<Uint8Array>({
      pull: (control) => control.enqueue(new TextEncoder().encode("data: x\n\n")),
      cancel: () => {
        isCancelled = true;
      },
    });
    for await (const data of events(body)) {
      expect(data).toBe("x");
      break;
    }
    expect(isCancelled).toBe(true);
  });
});
