import { describe, expect, it } from "vitest";
import { alignEnd, levelOf, textBefore, TokenAligner, type Token, type Unit } from "../src/lib/tokens";
import { randomOf } from "./random";

const token = (text: string, logprob = -1): Token => ({
  text,
  logprob,
  isPart: text.includes("\ufffd"),
  top: [{ text, logprob, isPart: false }],
});
const texts = (units: readonly Unit[]) => units.map(({ text }) => text);
const PART = "\ufffd";

describe("the units of a growing text", () => {
  it("are its tokens", () => {
    const aligner = new TokenAligner();
    expect(texts(aligner.push([token("Hello")], "Hello"))).toEqual(["Hello"]);
    expect(texts(aligner.push([token(" wor"), token("ld")], " world"))).toEqual([" wor", "ld"]);
    expect(aligner.end()).toEqual([]);
  });

  it("join tokens that are parts of one character", () => {
    const aligner = new TokenAligner();
    expect(aligner.push([token(PART, -1)], "")).toEqual([]);
    expect(aligner.push([token(PART, -2)], "")).toEqual([]);
    const units = aligner.push([token(PART, -4), token("!")], "😀!");
    expect(texts(units)).toEqual(["😀", "!"]);
    expect(units[0]!.logprob).toBe(-7);
    expect(units[0]!.top[0]!.logprob).toBe(-1);
  });

  it("go on after an end mark that follows parts of a character", () => {
    const aligner = new TokenAligner();
    expect(aligner.push([token(PART), token("<|end|>"), token("!")], "😀")).toEqual([]);
    expect(texts(aligner.push([token("?")], "!?"))).toEqual(["😀", "!", "?"]);
    const ends = Array.from({ length: 8 }, () => token("<|end|>"));
    expect(aligner.push([token(PART), ...ends, token("!")], "😀!")).toEqual([]);
    expect(texts(aligner.end())).toEqual(["😀!"]);
  });

  it("wait for text that is held back", () => {
    const aligner = new TokenAligner();
    expect(aligner.push([token("ab")], "a")).toEqual([]);
    expect(texts(aligner.push([token("c")], "bc"))).toEqual(["ab", "c"]);
    expect(aligner.push([token("de")], "d")).toEqual([]);
    expect(texts(aligner.end())).toEqual(["d"]);
  });

  it("leave out tokens that are not in the text", () => {
    const aligner = new TokenAligner();
    const hidden = [token("<think>"), token("hm"), token("</think>"), token("\n\n")];
    expect(texts(aligner.push([...hidden, token("Yes")], "Yes"))).toEqual(["Yes"]);
    expect(texts(aligner.push([], "?"))).toEqual(["?"]);
    expect(aligner.push([token("<|im_end|>")], "")).toEqual([]);
    expect(aligner.end()).toEqual([]);
  });

  it("begin with a token that has lost its space", () => {
    expect(texts(new TokenAligner().push([token(" Yes"), token(" no")], "Yes no"))).toEqual(["Yes", " no"]);
  });

  it.each([1, 2, 3, 4, 5, 6])("are the text, however it comes (seed %i)", (seed) => {
    const random = randomOf(seed);
    const encoder = new TextEncoder();
    for (let round = 0; round < 60; round++) {
      const letters = ["a", "é", "你", "😀", " ", "\n", "the "];
      const text = Array.from({ length: 1 + random.int(20) }, () => letters[random.int(7)]!).join("");
      const bytes = encoder.encode(text);
      const decoder = new TextDecoder();
      const tokens: Token[] = [];
      const aligner = new TokenAligner();
      const units: Unit[] = [];
      let shown = "";
      for (let at = 0; at < bytes.length;) {
        const made: Token[] = [];
        let delta = "";
        for (let n = 1 + random.int(3); n > 0 && at < bytes.length; n--) {
          const piece = bytes.slice(at, (at += 1 + random.int(4)));
          made.push(token(new TextDecoder().decode(piece)));
          delta += decoder.decode(piece, { stream: true });
        }
        tokens.push(...made);
        shown += delta;
        units.push(...aligner.push(made, delta));
        expect(shown.startsWith(texts(units).join(""))).toBe(true);
      }
      units.push(...aligner.end());
      expect(texts(units).join("")).toBe(text);
      const template = [token("<user>"), token("the "), token("\n")];
      expect(texts(alignEnd([...template, ...tokens], text)).join("")).toBe(text);
    }
  });
});

describe("the units at the end of a prompt", () => {
  it("leave out the template", () => {
    const prompt = [
      token("Yes"),
      token("<assistant>"),
      token("Yes"),
      token(" and"),
      token(PART),
      token(PART),
    ];
    const units = alignEnd(prompt, "Yes and😀");
    expect(texts(units)).toEqual(["Yes", " and", "😀"]);
    expect(units.every(({ logprob }) => logprob !== null)).toBe(true);
  });

  it("say what is not known", () => {
    expect(alignEnd([token("b")], "ab")).toEqual([
      { text: "a", logprob: null, top: [] },
      { text: "b", logprob: -1, top: token("b").top },
    ]);
  });
});

it("a probability has a level, and a place has the text before it", () => {
  const levels = [0.01, 0.05, 0.3, 0.5, 0.89, 0.95, 1].map((p) => levelOf(Math.log(p) + 1e-12));
  expect(levels).toEqual([0, 1, 2, 3, 3, 4, 4]);
  const units = ["a", "b", "c"].map((text) => ({ text, logprob: -1, top: [] }));
  expect(textBefore(units, 2)).toBe("ab");
});
