// The sampling parameters: their names on the wire and the bounds that the server checks (python/llaisys/sampling_params.py).

import type { ChatSettings, Params } from "./types";

interface Base {
  name: string;
  /** Shown at once; the others are under "more". */
  common: boolean;
}
export interface NumberParam extends Base {
  kind: "number";
  min: number;
  max: number;
  step: number;
  /** What the server uses when neither the request nor the model (`Model.defaults`) sets it; null: no fixed value. */
  fallback: number | null;
  /** A slider makes sense for it. */
  slider: boolean;
}
export interface BooleanParam extends Base {
  kind: "boolean";
  fallback: boolean;
}
/** `strings` and `ids` are lists, one a line; `biases` has lines `token id: bias`. */
export interface ListParam extends Base {
  kind: "strings" | "ids" | "biases";
}
export type Param = NumberParam | BooleanParam | ListParam;

const TOKENS_MAX = 2 ** 31 - 1;

const number = (
  name: string,
  [min, max, step]: readonly [number, number, number],
  fallback: number | null,
  { slider = false, common = false } = {},
): NumberParam => ({ kind: "number", name, min, max, step, fallback, slider, common });
const list = (name: string, kind: ListParam["kind"], common = false): ListParam => ({ kind, name, common });
const boolean = (name: string, fallback: boolean): BooleanParam => ({
  kind: "boolean",
  name,
  fallback,
  common: false,
});

export const PARAMS: readonly Param[] = [
  number("temperature", [0, 2, 0.05], 1, { slider: true, common: true }),
  number("top_p", [0.01, 1, 0.01], 1, { slider: true, common: true }),
  number("top_k", [0, TOKENS_MAX, 1], 0, { common: true }),
  number("min_p", [0, 1, 0.01], 0, { slider: true, common: true }),
  number("max_tokens", [1, TOKENS_MAX, 1], null, { common: true }),
  number("seed", [Number.MIN_SAFE_INTEGER, Number.MAX_SAFE_INTEGER, 1], null, { common: true }),
  list("stop", "strings", true),
  number("repetition_penalty", [0.01, 10, 0.05], 1),
  number("presence_penalty", [-2, 2, 0.1], 0, { slider: true }),
  number("frequency_penalty", [-2, 2, 0.1], 0, { slider: true }),
  number("typical_p", [0.01, 1, 0.01], 1, { slider: true }),
  number("min_tokens", [0, TOKENS_MAX, 1], 0),
  list("stop_token_ids", "ids"),
  list("logit_bias", "biases"),
  boolean("ignore_eos", false),
  boolean("skip_special_tokens", true),
  boolean("include_stop_str_in_output", false),
];

/** A number typed into a field, or null if it is not one within the bounds. "" is undefined: not set. */
export function parseNumber(param: NumberParam, text: string): number | null | undefined {
  if (text.trim() === "") return undefined;
  const value = Number(text);
  const whole = Number.isInteger(param.step);
  if (!Number.isFinite(value) || value < param.min || value > param.max) return null;
  return whole && !Number.isInteger(value) ? null : value;
}

/** A list typed into a field, one entry a line; null if an entry is wrong, undefined if there is none. */
export function parseList(kind: ListParam["kind"], text: string): Params[string] | null | undefined {
  const lines = text.split("\n").filter((line) => line !== "");
  if (lines.length === 0) return undefined;
  if (kind === "strings") return lines.length <= 16 ? lines.map(unescapeNewlines) : null;
  if (kind === "ids") {
    const ids = lines.flatMap((line) => line.split(/[\s,]+/).filter(Boolean)).map(Number);
    return ids.every((id) => Number.isInteger(id) && id >= 0 && id <= TOKENS_MAX) ? ids : null;
  }
  const biases: Record<string, number> = {};
  for (const line of lines) {
    const [, id, bias] = /^\s*(\d+)\s*[:=]\s*([-+]?[\d.]+)\s*$/.exec(line) ?? [];
    if (id === undefined || !(Math.abs(Number(bias)) <= 100)) return null;
    biases[id] = Number(bias);
  }
  return biases;
}

/** The text that `parseList` reads back as the same value. */
export function listText(kind: ListParam["kind"], value: Params[string] | undefined): string {
  if (value === undefined) return "";
  if (kind === "biases")
    return Object.entries(value)
      .map(([id, bias]) => `${id}: ${bias}`)
      .join("\n");
  if (kind === "ids") return (value as number[]).join(", ");
  return (value as string[]).map((stop) => stop.replaceAll("\\", "\\\\").replaceAll("\n", "\\n")).join("\n");
}

function unescapeNewlines(line: string): string {
  return line.replace(/\\(n|\\)/g, (_, c: string) => (c === "n" ? "\n" : "\\"));
}

export interface Preset {
  name: string;
  system: string;
  params: Params;
}

/** The presets that are always there; their names are translated. */
export const PRESETS: readonly Preset[] = [
  { name: "balanced", system: "", params: {} },
  { name: "precise", system: "", params: { temperature: 0 } },
  { name: "creative", system: "", params: { temperature: 1.2, min_p: 0.05 } },
];

export const DEFAULT_CHAT: ChatSettings = { model: "", system: "", params: {} };
