// Tokens with their probabilities, and which part of an answer's text each of them is.

/** A token as the server reports it. */
export interface Candidate {
  text: string;
  /** Natural logarithm of the probability, before temperature and other sampling parameters. */
  logprob: number;
  /** The token is a part of a character: its text does not hold its bytes. */
  isPart: boolean;
}

export interface Token extends Candidate {
  /** The likeliest tokens in this place, best first. The chosen one may not be among them. */
  top: readonly Candidate[];
}

/** A piece of an answer's text: one token, or several that only together are whole characters. */
export interface Unit {
  text: string;
  /** Of all its tokens together; null if it is not known. */
  logprob: number | null;
  /** In place of its first token. */
  top: readonly Candidate[];
}

/** Whole tokens that are looked for after parts of a character. */
const LOOKED_AT = 8;

/**
 * Divides text into units as both the tokens and the text arrive. The texts of all units are always the text that was
 * pushed, except the end of it that may still belong to a token. Tokens that are not in the text (tags of reasoning, an
 * end mark) are left out.
 */
export class TokenAligner {
  #tokens: Token[] = [];
  #text = "";

  /** `first`: the first token of a group that is one unit; other than the group's first if the text is reversed. */
  constructor(private readonly first = (group: readonly Token[]) => group[0]!) {}

  push(tokens: readonly Token[], text: string): Unit[] {
    this.#tokens.push(...tokens);
    this.#text += text;
    const units: Unit[] = [];
    while (this.#text !== "" && this.#tokens.length > 0) {
      const unit = this.#tokens[0]!.isPart ? this.#parts() : this.#whole();
      if (unit === "wait") break;
      if (unit !== "skip") units.push(unit);
    }
    if (this.#text !== "" && this.#tokens.length === 0) units.push(this.#unknown());
    return units;
  }

  /** The rest, after the last token. */
  end(): Unit[] {
    const units = this.push([], "");
    if (this.#text === "") return units;
    const [first] = this.#tokens;
    const { text } = this.#unknown();
    return [...units, { text, logprob: first?.logprob ?? null, top: first?.top ?? [] }];
  }

  #whole(): Unit | "wait" | "skip" {
    const token = this.#tokens[0]!;
    // The first token of a text may have lost its leading space, or a space that is no token's came before it.
    const spaceless = token.text.trimStart();
    const space = this.#text.length - this.#text.trimStart().length;
    for (const found of [token.text, spaceless, this.#text.slice(0, space) + token.text]) {
      if (found !== "" && this.#text.startsWith(found)) {
        return this.#cut(found.length, [this.#tokens.shift()!]);
      }
    }
    if (token.text.startsWith(this.#text)) return "wait";
    this.#tokens.shift();
    return "skip";
  }

  /**
   * The tokens up to the next whole one are the text up to that. If the text does not have it, because it is an end mark
   * or its own text is still to come, one of the next is looked for.
   */
  #parts(): Unit | "wait" {
    let whole = 0;
    for (const [n, { text, isPart }] of this.#tokens.entries()) {
      if (isPart) continue;
      const length = text === "" ? -1 : this.#text.indexOf(text, 1);
      if (length > 0)
        return this.#cut(
          length,
          this.#tokens.splice(0, n).filter((token) => token.isPart),
        );
      if (++whole === LOOKED_AT) break;
    }
    return whole > 0 ? "wait" : this.#cut(this.#text.length, this.#tokens.splice(0));
  }

  #cut(length: number, tokens: readonly Token[]): Unit {
    const text = this.#text.slice(0, length);
    this.#text = this.#text.slice(length);
    const logprob = tokens.reduce((sum, token) => sum + token.logprob, 0);
    return { text, logprob, top: this.first(tokens).top };
  }

  #unknown(): Unit {
    const text = this.#text;
    this.#text = "";
    return { text, logprob: null, top: [] };
  }
}

/** The units of a text that these tokens end with, such as the tokens of a prompt. */
export function alignEnd(tokens: readonly Token[], text: string): Unit[] {
  const turn = (each: string) => each.split("").reverse().join("");
  const aligner = new TokenAligner((group) => group.at(-1)!);
  const turned = tokens.map((token) => ({ ...token, text: turn(token.text) })).reverse();
  const units = [...aligner.push(turned, turn(text)), ...aligner.end()];
  return units.map((unit) => ({ ...unit, text: turn(unit.text) })).reverse();
}

/** The text of the first `n` units. */
export function textBefore(units: readonly Unit[], n: number): string {
  return units.slice(0, n).reduce((text, unit) => text + unit.text, "");
}

/** How likely, from 0 (surprising) to `LEVELS.length` (nearly certain). */
export function levelOf(logprob: number): number {
  const probability = Math.exp(logprob);
  return LEVELS.filter((least) => probability >= least).length;
}

/** The least probabilities of the levels above 0. */
export const LEVELS = [0.05, 0.2, 0.5, 0.9] as const;
