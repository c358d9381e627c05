import { describe, expect, it } from "vitest";
import { continuedTiming, continuedUsage, figures } from "../src/lib/figures";
import { listRows } from "../src/lib/groups";
import { LANGUAGES, translate } from "../src/lib/i18n";
import { plotPoints, ratesOf, sampleOf } from "../src/lib/metrics";
import { listText, PARAMS, parseList, parseNumber, type NumberParam } from "../src/lib/params";
import { continueReasoning, splitReasoning } from "../src/lib/reasoning";
import { actionOf, SHORTCUTS } from "../src/lib/shortcuts";
import { cleanTitle, titleOf } from "../src/lib/title";
import { newSession } from "../src/lib/transfer";
import { offsetOf, rowAt, visibleRange } from "../src/lib/window";
import { randomOf } from "./random";

describe("reasoning", () => {
  it.each([
    ["plain", { reasoning: "", answer: "plain", thinking: false }],
    ["<think>hm</think>\n\nyes", { reasoning: "hm", answer: "yes", thinking: false }],
    ["<think>hm", { reasoning: "hm", answer: "", thinking: true }],
    ["<thi", { reasoning: "", answer: "", thinking: true }],
    ["hm</think>yes", { reasoning: "hm", answer: "yes", thinking: false }],
    ["say <think> in text", { reasoning: "", answer: "say <think> in text", thinking: false }],
    ["", { reasoning: "", answer: "", thinking: false }],
  ])("of %j", (text, expected) => {
    expect(splitReasoning(text)).toEqual(expected);
  });

  it("may come apart from the text", () => {
    expect(splitReasoning("", "hm")).toEqual({ reasoning: "hm", answer: "", thinking: true });
    expect(splitReasoning("yes", "hm")).toEqual({ reasoning: "hm", answer: "yes", thinking: false });
  });

  it("goes on until its tag closes, which may come in pieces", () => {
    const [open, half] = [continueReasoning("let", " me"), continueReasoning("let me</thi", "nk>\n\nyes")];
    expect(open).toEqual({ reasoning: "let me", answer: "", thinking: true });
    expect(half).toEqual({ reasoning: "let me", answer: "yes", thinking: false });
  });
});

describe("the rows of a long list", () => {
  it.each([1, 2, 3, 4])("cover the view, and their heights add up (seed %i)", (seed) => {
    const random = randomOf(seed);
    const heights = Array.from({ length: 200 }, () => 1 + random.int(90));
    const total = heights.reduce((a, b) => a + b, 0);
    for (let i = 0; i < 50; i++) {
      const top = random.int(total);
      const range = visibleRange(200, (n) => heights[n]!, { top, height: 300, overscan: 50 });
      const inside = heights.slice(range.start, range.end).reduce((a, b) => a + b, 0);
      expect(range.before + inside + range.after).toBe(total);
      expect(range.before).toBeLessThanOrEqual(Math.max(0, top - 50));
      expect(range.before + inside).toBeGreaterThanOrEqual(Math.min(total, top + 350));
      expect(inside).toBeLessThanOrEqual(400 + 2 * 90);
      expect(range.before).toBe(offsetOf(range.start, (n) => heights[n]!));
    }
    const height = (n: number) => 10 * (n + 1); // tops: 0, 10, 30
    expect(rowAt(3, height, 0)).toEqual({ index: 0, offsetPx: 0 });
    expect(rowAt(3, height, 29)).toEqual({ index: 1, offsetPx: 19 });
    expect(rowAt(3, height, 30)).toEqual({ index: 2, offsetPx: 0 });
    expect(rowAt(3, height, 99)).toEqual({ index: 2, offsetPx: 69 });
    expect(visibleRange(0, () => 1, { top: 0, height: 9, overscan: 9 })).toEqual({
      start: 0,
      end: 0,
      before: 0,
      after: 0,
    });
  });
});

describe("the session list", () => {
  it("has pinned ones, folders, then ages; newest first", () => {
    const now = new Date(2026, 5, 15, 12).getTime();
    const day = 86_400_000;
    const make = (title: string, ago: number, fields = {}) =>
      newSession(now, { title, updatedMs: now - ago * day, ...fields });
    const rows = listRows(
      [
        make("old", 100),
        make("now", 0),
        make("pinned", 50, { pinned: true, folder: "b" }),
        make("b1", 3, { folder: "b" }),
        make("a1", 2, { folder: "a" }),
        make("b2", 1, { folder: "b" }),
        make("yesterday", 1),
      ],
      now,
      new Set(["folder:a"]),
    );
    const shown = rows.map((row) => (row.kind === "session" ? row.session.title : `[${row.key} ${row.n}]`));
    expect(shown).toEqual([
      "[pinned 1]", "pinned", "[folder:a 1]", "[folder:b 2]", "b2", "b1",
      "[today 1]", "now", "[yesterday 1]", "yesterday", "[older 1]", "old",
    ]); // prettier-ignore
  });
});

describe("titles", () => {
  it("come from the first line with words", () => {
    expect(titleOf("\n---\n## Tides, *how*?\nmore")).toBe("Tides, *how*?");
    expect(titleOf("???")).toBe("???");
    expect(titleOf("word ".repeat(40))).toMatch(/^(word )+word…$/);
    expect([...titleOf("天".repeat(90))]).toHaveLength(60);
  });

  it("hold nothing that turns the text around", () => {
    expect(cleanTitle("a\u202Eb\u2066c\u0007\n\td")).toBe("abc d");
  });
});

describe("parameters", () => {
  const number = (name: string) => PARAMS.find((param) => param.name === name) as NumberParam;
  it.each([
    ["temperature", "0.7", 0.7],
    ["temperature", "2.1", null],
    ["temperature", "-0.1", null],
    ["temperature", "warm", null],
    ["temperature", " ", undefined],
    ["top_k", "40", 40],
    ["top_k", "1.5", null],
    ["seed", "-7", -7],
    ["max_tokens", "0", null],
  ])("%s of %j is %j", (name, text, expected) => {
    expect(parseNumber(number(name), text)).toBe(expected);
  });

  it.each([
    ["strings", "a\\nb\n\nc\\\\n", ["a\nb", "c\\n"]],
    ["strings", "\n", undefined],
    ["strings", "x\n".repeat(17), null],
    ["ids", "1, 2\n3", [1, 2, 3]],
    ["ids", "1 -2", null],
    ["biases", "5: 1.5\n7: -100", { 5: 1.5, 7: -100 }],
    ["biases", "5: 101", null],
    ["biases", "five: 1", null],
  ] as const)("%s of %j", (kind, text, expected) => {
    const read = parseList(kind, text);
    expect(read).toEqual(expected);
    if (read) expect(parseList(kind, listText(kind, read))).toEqual(read);
  });

  it("each have a meaning in each language", () => {
    for (const { texts } of Object.values(LANGUAGES)) {
      for (const { name } of PARAMS) expect(texts).toHaveProperty(`param_${name}`);
    }
  });
});

describe("texts", () => {
  it("have the same variables in each language", () => {
    const variables = (text: string) => (text.match(/\{\w+\}/g) ?? []).sort();
    for (const [key, text] of Object.entries(LANGUAGES.en.texts)) {
      expect([key, variables(LANGUAGES.zh.texts[key as "you"])]).toEqual([key, variables(text)]);
    }
    expect(translate("en", "n_hits", { n: 3 })).toBe("3 hits");
  });
});

describe("metrics", () => {
  const text = (generated: number) => `# HELP x
vllm:num_requests_running{model_name="a",engine="0"} 2.0
vllm:kv_cache_usage_perc{model_name="a",engine="0"} 0.25
vllm:generation_tokens_total{model_name="a",engine="0"} ${generated}.0
vllm:generation_tokens_total{model_name="b",engine="0"} 1e1
llaisys:kv_cells{state="used"} 10.0
llaisys:kv_cells{state="free"} 30.0
vllm:time_to_first_token_seconds_sum 3.0
vllm:time_to_first_token_seconds_count 2.0
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 2.0
`;
  it("are summed over labels, and give rates", () => {
    const before = sampleOf(text(100), 1000);
    const after = sampleOf(text(150), 3000);
    expect(before).toMatchObject({ running: 2, kvUsage: 0.25, kvCells: 40, generationTokens: 110 });
    expect(ratesOf(before, after).generatedPerS).toBe(25);
    expect(ratesOf(before, after).firstTokenS).toBeNull();
    expect(ratesOf(after, sampleOf(text(0), 4000)).generatedPerS).toBe(10);
  });

  it("are drawn with the newest at the right edge", () => {
    expect(plotPoints([0, 2], { width: 10, height: 4, n: 3, max: 1 })).toBe("5.0,4.0 10.0,0.0");
  });
});

describe("figures of an answer", () => {
  it("count the rate from the first token on", () => {
    const message = {
      id: "a", parent: null, role: "assistant", content: "", createdMs: 0,
      usage: { promptTokens: 9, cachedTokens: 4, completionTokens: 21, draftTokens: 8, acceptedTokens: 5 },
      timing: { firstTokenMs: 500, totalMs: 2500 },
    } as const; // prettier-ignore
    expect(figures(message)).toEqual({
      prompt: 9,
      cached: 4,
      completion: 21,
      firstTokenS: 0.5,
      tokensPerS: 10,
      drafts: 8,
      accepted: 5,
    });
    const bare = figures({ ...message, usage: undefined, timing: undefined });
    expect([bare.tokensPerS, bare.drafts]).toEqual([null, 0]);
  });
});

describe("figures of a continued answer", () => {
  it("count all its pieces", () => {
    const before = {
      promptTokens: 10,
      cachedTokens: 4,
      completionTokens: 8,
      draftTokens: 6,
      acceptedTokens: 2,
    };
    const piece = {
      promptTokens: 18,
      cachedTokens: 16,
      completionTokens: 5,
      draftTokens: 3,
      acceptedTokens: 3,
    };
    expect(continuedUsage(before, piece)).toEqual({
      promptTokens: 10, cachedTokens: 4, completionTokens: 13, draftTokens: 9, acceptedTokens: 5,
    }); // prettier-ignore
    expect(continuedUsage(undefined, piece)).toBe(piece);
  });

  it("leave out the wait before a later piece", () => {
    const piece = { firstTokenMs: 200, totalMs: 1200 };
    const before = { firstTokenMs: 100, totalMs: 600, reasoningMs: 300 };
    expect(continuedTiming(before, { ...piece, reasoningMs: 50 })).toEqual({
      firstTokenMs: 100, totalMs: 1600, reasoningMs: 350,
    }); // prettier-ignore
    expect(continuedTiming(undefined, piece)).toBe(piece);
  });
});

describe("shortcuts", () => {
  const press = (key: string, fields = {}) =>
    actionOf({ key, ctrlKey: false, metaKey: false, shiftKey: false, altKey: false, ...fields });
  it("are what the help sheet says", () => {
    expect(press("k", { ctrlKey: true })).toBe("search");
    expect(press("K", { metaKey: true })).toBe("search");
    expect(press("O", { ctrlKey: true, shiftKey: true })).toBe("new");
    expect(press("o", { ctrlKey: true })).toBeNull();
    expect(press("Escape")).toBe("stop");
    expect(press("k")).toBeNull();
    expect(press("k", { ctrlKey: true, altKey: true })).toBeNull();
    expect(press("Enter")).toBeNull();
    for (const { keys, action } of SHORTCUTS.filter(({ keys }) => keys[0] === "Ctrl")) {
      const fields = { ctrlKey: true, shiftKey: keys.includes("Shift") };
      expect(press(keys.at(-1)!, fields)).toBe(action ?? null);
    }
  });
});

describe("the list of shortcuts", () => {
  const KEYS: Record<string, string> = { "↑": "ArrowUp", "↓": "ArrowDown", Esc: "Escape" };
  it("that work everywhere are those of the list, each with its own keys", () => {
    const listed = SHORTCUTS.filter(({ action }) => action !== undefined);
    for (const { keys, action } of listed) {
      const key = keys.at(-1)!;
      const pressed = {
        key: KEYS[key] ?? key.toLowerCase().replace("enter", "Enter"),
        ctrlKey: keys.includes("Ctrl"),
        shiftKey: keys.includes("Shift"),
        altKey: keys.includes("Alt"),
        metaKey: false,
      };
      expect(actionOf(pressed)).toBe(action);
    }
    expect(new Set(listed.map(({ action }) => action)).size).toBe(listed.length);
    const enter = { key: "Enter", ctrlKey: false, shiftKey: false, altKey: false, metaKey: false };
    expect(actionOf(enter)).toBeNull();
    expect(actionOf({ ...enter, key: "ArrowUp" })).toBeNull();
  });
});
