import { afterEach, expect, it, vi } from "vitest";
import type { Link } from "../src/lib/responses";
import type { Message } from "../src/lib/types";

const { Generation } = await import("../src/state/generation");

const link: Link = { key: () => "", retry: () => Promise.resolve() };
const answer = (fields: Partial<Message>): Message => ({
  id: "m",
  parent: "q",
  role: "assistant",
  content: "",
  createdMs: 1,
  end: "running",
  ...fields,
});
const RUN = { id: "resp_a", after: 3, content: 0, reasoning: 0, askedMs: 1000 };

/** Serves these events and the timeline of the request, and reads the answer to its end. */
async function resumed(message: Message, events: unknown[], timeline?: unknown) {
  const asked: string[] = [];
  const saved: Partial<Message>[] = [];
  vi.stubGlobal("document", { hidden: true });
  vi.stubGlobal("addEventListener", () => {});
  vi.stubGlobal("removeEventListener", () => {});
  vi.stubGlobal("cancelAnimationFrame", () => {});
  vi.stubGlobal("fetch", (url: string) => {
    asked.push(url);
    if (url.endsWith("/timeline")) {
      const body = timeline === undefined ? {} : { choices: [timeline] };
      return Promise.resolve(new Response(JSON.stringify(body), { status: timeline ? 200 : 404 }));
    }
    return Promise.resolve(new Response(events.map((e) => `data: ${JSON.stringify(e)}\n\n`).join("")));
  });
  const sink = {
    seen: () => {},
    draw: () => {},
    save: (fields: Partial<Message>) => saved.push(fields),
    failed: () => {},
  };
  await new Generation(message).resume(message.run!, link, sink);
  return { asked, saved, last: saved.at(-1)! };
}

afterEach(() => vi.unstubAllGlobals());

const delta = (sequence_number: number, text: string) => ({
  type: "response.output_text.delta",
  sequence_number,
  delta: text,
});
const END = {
  type: "response.completed",
  sequence_number: 9,
  response: {
    status: "completed",
    output: [],
    usage: { input_tokens: 7, output_tokens: 3, input_tokens_details: { cached_tokens: 5 } },
  },
};

it("adds the events after the last one that the answer has", async () => {
  const { asked, saved, last } = await resumed(answer({ content: "one ", run: RUN }), [delta(4, "two"), END]);
  expect(asked[0]).toBe("./v1/responses/resp_a?stream=true&starting_after=3");
  expect(saved[0]!.run).toEqual(RUN);
  expect(last).toMatchObject({ content: "one two", end: "stop", run: undefined });
  expect(last.usage).toEqual({ promptTokens: 7, cachedTokens: 5, completionTokens: 3 });
});

it("stores the text of whole events only, with the number of the last one", async () => {
  const { saved } = await resumed(answer({ content: "one ", run: RUN }), [
    delta(4, "two "),
    delta(5, "3"),
    END,
  ]);
  const pairs = saved.filter(({ run }) => run).map(({ content, run }) => [content, run!.after]);
  expect(pairs).toContainEqual(["one two ", 4]);
  expect(pairs).not.toContainEqual(["one two ", 3]);
});

it("adds to the figures that a continued answer had before", async () => {
  const before = {
    usage: { promptTokens: 5, cachedTokens: 0, completionTokens: 2 },
    timing: { firstTokenMs: 100, totalMs: 999_999 }, // with the part that is being read
  };
  const run = { ...RUN, content: 4, firstMs: 1200, timing: { firstTokenMs: 100, totalMs: 300 } };
  const spans = [
    { kind: "own_chunk", start_s: 0, end_s: 0.2, by: [] },
    { kind: "decode", start_s: 0.2, end_s: 0.7, by: [] },
  ];
  const timeline = {
    arrived_at: 1,
    is_over: true,
    total_s: 0.7,
    seconds: { decode: 0.5 },
    num_draft_tokens: 0,
    num_accepted_tokens: 0,
    spans,
  };
  const message = answer({ content: "one two", ...before, run });
  const { last } = await resumed(message, [delta(4, " three"), END], timeline);
  expect(last.content).toBe("one two three");
  expect(last.usage!.completionTokens).toBe(5);
  // Both from the first token on: 300 ms, and 700 ms less the 200 ms before it.
  expect(last.timing).toEqual({ firstTokenMs: 100, totalMs: 800 });
});

it("does not claim a time that no page has measured", async () => {
  const { last } = await resumed(answer({ run: RUN }), [delta(4, "text"), END]);
  expect(last.timing).toBeUndefined();
});

it("reads a continued reasoning from its beginning, because its end is inside the text", async () => {
  const message = answer({ reasoning: "so far and more", run: { ...RUN, reasoning: 6 } });
  const { asked, last } = await resumed(message, [delta(0, " and more</think>"), delta(1, "Yes."), END]);
  expect(asked[0]).toBe("./v1/responses/resp_a?stream=true");
  expect(last).toMatchObject({ reasoning: "so far and more", content: "Yes." });
});
