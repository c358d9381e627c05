import { describe, expect, it } from "vitest";
import { fromFile, fromJson } from "../src/lib/transfer";
import { fromMessages, path } from "../src/lib/tree";
import { randomOf } from "./random";

const NOW = 1_800_000_000_000;
const read = (root: unknown) => fromJson(JSON.stringify(root), NOW);
const shown = (root: unknown) => {
  const [whole] = read(root).wholes;
  return path(fromMessages(whole!.messages, whole!.session.chosen));
};

const gptNode = (id: string, parent: string | null, message: object | null) => [
  id,
  { id, parent, children: [], message },
];
const gptText = (role: string, text: string, more: object = {}) => ({
  author: { role },
  create_time: 1_700_000_000.5,
  content: { content_type: "text", parts: [text] },
  metadata: {},
  ...more,
});
const CHATGPT = {
  title: "Tides",
  create_time: 1_700_000_000,
  update_time: 1_700_000_100.25,
  current_node: "a2",
  mapping: Object.fromEntries([
    gptNode("root", null, null),
    gptNode("s", "root", gptText("system", "")),
    gptNode(
      "hidden",
      "s",
      gptText("user", "x", { metadata: { is_visually_hidden_from_conversation: true } }),
    ),
    gptNode("q", "hidden", gptText("user", "Why?")),
    gptNode("a0", "q", gptText("assistant", "an older answer")),
    gptNode("a1", "q", gptText("assistant", "Let me look.", { metadata: { model_slug: "gpt-x" } })),
    gptNode("call", "a1", gptText("assistant", "search()", { recipient: "web" })),
    gptNode("tool", "call", gptText("tool", "results")),
    gptNode("a2", "tool", gptText("assistant", "The moon\ue200cite\ue202turn0\ue201.")),
    gptNode("image", "a0", {
      author: { role: "user" },
      content: { content_type: "multimodal_text", parts: [{ asset_pointer: "file://x" }, "And this?"] },
    }),
  ]),
};

const OPEN_WEBUI = {
  id: "1",
  title: "Tides",
  pinned: true,
  created_at: 1_700_000_000,
  updated_at: 1_700_000_100,
  chat: {
    title: "Tides",
    history: {
      currentId: "a",
      messages: {
        q: {
          id: "q",
          parentId: null,
          role: "user",
          content: "Why?",
          timestamp: 1_700_000_000,
          files: [{ type: "file", name: "n.txt", file: { data: { content: "notes" } } }],
        },
        a: {
          id: "a",
          parentId: "q",
          role: "assistant",
          model: "llama3",
          content:
            '<details type="reasoning" done="true" duration="2">\n<summary>Thought for 2 seconds</summary>\n' +
            '> hm\n&gt; a &lt; b\n</details>\n<details type="tool_calls" done="true">\n<summary>x</summary>\n</details>' +
            "The moon.",
        },
        b: { id: "b", parentId: "q", role: "assistant", content: "Another answer." },
      },
    },
  },
};

const LLAMA_CPP = {
  conv: { id: "c", name: "Tides", lastModified: 1_700_000_000_000, currNode: "a" },
  messages: [
    { id: "r", type: "root", role: "system", content: "", parent: null, children: ["q"], timestamp: 1 },
    {
      id: "q",
      type: "text",
      role: "user",
      content: "Why?",
      parent: "r",
      timestamp: 2,
      extra: [
        { type: "textFile", name: "n.txt", content: "notes" },
        { type: "imageFile", name: "i.png", base64Url: "data:" },
        { type: "PDF", name: "p.pdf", content: "pages" },
      ],
    },
    {
      id: "a",
      type: "text",
      role: "assistant",
      content: "The moon.",
      parent: "q",
      timestamp: 3,
      thinking: "hm",
    },
    { id: "b", type: "text", role: "assistant", content: "Other.", parent: "q", timestamp: 4 },
  ],
};

describe("an import of", () => {
  it("ChatGPT has the shown messages, with all branches", () => {
    const [whole] = read([CHATGPT]).wholes;
    expect(whole!.session).toMatchObject({ title: "Tides", createdMs: 1_700_000_000_000 });
    expect(whole!.session.updatedMs).toBe(1_700_000_100_250);
    const messages = shown([CHATGPT]);
    expect(messages.map(({ role, content }) => [role, content])).toEqual([
      ["user", "Why?"],
      ["assistant", "Let me look.\n\nThe moon."],
    ]);
    expect(messages[1]).toMatchObject({ model: "gpt-x", end: "stop", createdMs: 1_700_000_000_500 });
    const others = whole!.messages.map(({ content }) => content);
    expect(others).toContain("an older answer");
    expect(others).toContain("And this?");
    expect(others).toHaveLength(4);
  });

  it("Open WebUI has reasoning and files apart from the text", () => {
    const [question, answer] = shown([OPEN_WEBUI]);
    expect(question!.attachments).toEqual([{ name: "n.txt", kind: "text", text: "notes" }]);
    expect(answer).toMatchObject({ content: "The moon.", reasoning: "hm\na < b", model: "llama3" });
    const [whole] = read(OPEN_WEBUI).wholes;
    expect(whole!.session).toMatchObject({ pinned: true, updatedMs: 1_700_000_100_000 });
    expect(whole!.messages).toHaveLength(3);
  });

  it("llama.cpp has reasoning and files, one chat or several", () => {
    const [question, answer] = shown(LLAMA_CPP);
    expect(question!.attachments).toEqual([
      { name: "n.txt", kind: "text", text: "notes" },
      { name: "p.pdf", kind: "pdf", text: "pages" },
    ]);
    expect(answer).toMatchObject({ content: "The moon.", reasoning: "hm" });
    expect(read([LLAMA_CPP, LLAMA_CPP]).wholes).toHaveLength(2);
  });

  it("a list with entries of other kinds skips these", () => {
    const circle = { ...LLAMA_CPP, messages: [{ id: "a", parent: "a", role: "user", content: "x" }] };
    const { wholes, skipped } = read([CHATGPT, null, "text", { mapping: {} }, circle]);
    expect([wholes.length, skipped]).toEqual([1, 4]);
  });

  it("a chat with more messages than a person writes leaves it out", () => {
    const messages = Array.from({ length: 10_001 }, (_, i) => ({ id: `${i}`, role: "user", content: "x" }));
    expect(read([{ ...LLAMA_CPP, messages }, LLAMA_CPP])).toMatchObject({ skipped: 1 });
  });

  it.each([
    ["import_zip", "PK\u0003\u0004"],
    ["import_not_chats", "[]"],
    ["import_not_chats", "7"],
    ["import_not_chats", '[{"messages":[]}]'],
    ["import_empty", '[{"mapping":{}}]'],
    ["import_too_many", JSON.stringify(Array(50_001).fill(null))],
  ])("a wrong file says %s", (key, text) => {
    expect(() => fromFile("conversations.json", text, NOW)).toThrowError(expect.objectContaining({ key }));
  });

  it.each([1, 2, 3, 4])("any damaged file gives whole chats or is refused (seed %i)", (seed) => {
    const random = randomOf(seed);
    const odd = [null, 7, "", "x", [], {}, -1e300, true, "q", "a", ["q"], { parts: [null] }];
    const damage = (value: unknown): unknown => {
      if (random.int(12) === 0) return random.pick(odd);
      if (Array.isArray(value)) return value.map(damage);
      if (typeof value !== "object" || value === null) return value;
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, damage(inner)]));
    };
    for (let i = 0; i < 100; i++) {
      const root = [CHATGPT, OPEN_WEBUI, LLAMA_CPP].map(damage);
      let wholes;
      try {
        ({ wholes } = read(root));
      } catch (error) {
        expect(error).toHaveProperty("key");
        continue;
      }
      for (const { messages, session } of wholes) {
        expect(fromMessages(messages, session.chosen).messages.size).toBe(messages.length);
        expect(messages.every(({ content }) => typeof content === "string")).toBe(true);
      }
    }
  });
});
