import { describe, expect, it } from "vitest";
import {
  fileName,
  fromFile,
  fromJson,
  fromMarkdown,
  ImportError,
  newSession,
  toJson,
  toMarkdown,
} from "../src/lib/transfer";
import { fromMessages, path } from "../src/lib/tree";
import type { Message } from "../src/lib/types";
import { randomOf } from "./random";

const NOW = 1_800_000_000_000;
const messages: Message[] = [
  { id: "a", parent: null, role: "user", content: "Hi 天", createdMs: 1 },
  { id: "b", parent: "a", role: "assistant", content: "one", createdMs: 2, end: "stop", model: "m" },
  {
    id: "c",
    parent: "a",
    role: "assistant",
    content: "two",
    reasoning: "hm",
    createdMs: 3,
    end: "length",
    usage: { promptTokens: 3, cachedTokens: 1, completionTokens: 2, draftTokens: 4, acceptedTokens: 1 },
    timing: { firstTokenMs: 5, totalMs: 9, reasoningMs: 2 },
    toolCalls: [{ id: "t", name: "f", arguments: "{}" }],
  },
  {
    id: "d",
    parent: "a",
    role: "assistant",
    content: "",
    createdMs: 4,
    end: "error",
    failure: { status: 429, code: "server_overloaded", message: "later", retryAtMs: NOW },
  },
];
const session = newSession(NOW, {
  title: "Greeting",
  folder: "work",
  pinned: true,
  chosen: { a: "b" },
  contextFrom: "a",
  settings: { model: "m", system: "s", params: { temperature: 0 } },
});

describe("JSON", () => {
  it("brings back everything but the ids", () => {
    const [read] = fromJson(toJson([{ session, messages }]), NOW).wholes;
    const { id, chosen, contextFrom, ...rest } = read!.session;
    expect(id).not.toBe(session.id);
    expect(rest).toEqual({ ...session, id: undefined, chosen: undefined, contextFrom: undefined });
    const strip = ({ id: _, parent: __, ...other }: Message) => other;
    expect(read!.messages.map(strip)).toEqual(messages.map(strip));
    const tree = fromMessages(read!.messages, chosen);
    expect(path(tree).map(({ content }) => content)).toEqual(["Hi 天", "one"]);
    expect(contextFrom).toBe(path(tree)[0]!.id);
  });

  it.each([
    ["no JSON", "import_not_json", "{"],
    ["another file", "import_not_chats", '{"a":1}'],
    ["a list", "import_not_chats", "[]"],
    ["a newer file", "import_newer", '{"format":"llaisys-chats","version":2,"chats":[{}]}'],
    ["an empty file", "import_empty", '{"format":"llaisys-chats","version":1,"chats":[]}'],
  ])("refuses %s", (_, key, text) => {
    expect(() => fromJson(text, NOW)).toThrowError(expect.objectContaining({ key }));
    expect(() => fromFile("x.json", text, NOW)).toThrow(ImportError);
  });

  it("believes nothing that has the wrong type", () => {
    const chats = [
      {
        title: { toString: "x" },
        pinned: "yes",
        folder: 7,
        chosen: { "": "nothing" },
        settings: [],
        messages: [
          {
            id: "a",
            parent: null,
            role: "user",
            content: "kept",
            createdMs: "now",
            usage: { promptTokens: "3" },
          },
          { id: "b", parent: "a", role: "robot", content: "no such role" },
          { id: "c", parent: "missing", role: "user", content: "hangs on nothing" },
          { id: "d", parent: "a", role: "user", content: 7 },
          "text",
          null,
        ],
      },
      "text",
    ];
    const { wholes: read, skipped } = fromJson(
      JSON.stringify({ format: "llaisys-chats", version: 1, chats }),
      NOW,
    );
    expect(skipped).toBe(1);
    expect(read).toHaveLength(1);
    expect(read[0]!.messages.map(({ content }) => content)).toEqual(["kept"]);
    expect(read[0]!.messages[0]).not.toHaveProperty("usage");
    expect(read[0]!.session).toMatchObject({
      title: "kept",
      pinned: false,
      folder: "",
      settings: null,
      chosen: {},
    });
  });
});

describe("Markdown", () => {
  const LINES = [
    "",
    "# a",
    "text",
    "<!-- llaisys: user -->",
    "\\<!-- llaisys: tool -->",
    "  ",
    "**You**",
    "天",
    "```",
  ];
  it.each([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])("brings back every text (seed %i)", (seed) => {
    const random = randomOf(seed);
    const made = Array.from({ length: 1 + random.int(6) }, (_, i): Message => {
      const lines = Array.from({ length: random.int(5) }, () => random.pick(LINES));
      const content = lines.join("\n");
      return { id: `${i}`, parent: null, role: i % 2 ? "assistant" : "user", content, createdMs: i };
    });
    const read = fromMarkdown(toMarkdown("A title", made), NOW);
    expect(read.session.title).toBe("A title");
    expect(read.messages.map(({ role, content }) => [role, content])).toEqual(
      made.map(({ role, content }) => [role, content]),
    );
  });

  it("is refused without a message", () => {
    expect(() => fromFile("a.md", "# Only a title", NOW)).toThrow(ImportError);
  });

  it("names files after their titles", () => {
    expect(fileName("Tides: how? 天", "md")).toBe("Tides-how-天.md");
    expect(fileName("../..", "json")).toBe("chats.json");
  });
});
