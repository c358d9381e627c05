// The Prometheus text of /metrics, as far as the status panel needs it.

export interface Sample {
  atMs: number;
  running: number;
  waiting: number;
  /** Share of the KV cells in use, 0 to 1. */
  kvUsage: number;
  kvCells: number;
  /** Of the KV cells: those of running requests and sessions, and those that only the prefix cache holds. */
  usedCells: number;
  cachedCells: number;
  promptTokens: number;
  generationTokens: number;
  firstTokenSumS: number;
  firstTokenCount: number;
}

/** What two samples say of the time between them. */
export interface Rates {
  generatedPerS: number;
  promptPerS: number;
  /** Mean time to the first token of the answers that began; null if none did. */
  firstTokenS: number | null;
}

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)/;

/** The sum of each metric over its labels. */
export function parseMetrics(text: string): Map<string, number> {
  const sums = new Map<string, number>();
  for (const line of text.split("\n")) {
    const [, name, value] = LINE.exec(line) ?? [];
    if (name === undefined) continue;
    const number = value === "+Inf" ? Infinity : Number(value);
    if (!Number.isNaN(number)) sums.set(name, (sums.get(name) ?? 0) + number);
  }
  return sums;
}

function cells(text: string, state: string): number {
  const found = text.matchAll(
    new RegExp(`^llaisys:kv_cells\\{[^}]*state="${state}"[^}]*\\}\\s+(\\S+)`, "gm"),
  );
  return [...found].reduce((sum, [, value]) => sum + Number(value), 0);
}

export function sampleOf(text: string, atMs: number): Sample {
  const sums = parseMetrics(text);
  const get = (name: string) => sums.get(name) ?? 0;
  return {
    atMs,
    running: get("vllm:num_requests_running"),
    waiting: get("vllm:num_requests_waiting"),
    kvUsage: get("vllm:kv_cache_usage_perc"),
    kvCells: get("llaisys:kv_cells"),
    usedCells: cells(text, "used"),
    cachedCells: cells(text, "cached"),
    promptTokens: get("vllm:prompt_tokens_total"),
    generationTokens: get("vllm:generation_tokens_total"),
    firstTokenSumS: get("vllm:time_to_first_token_seconds_sum"),
    firstTokenCount: get("vllm:time_to_first_token_seconds_count"),
  };
}

/** A counter that went down has been restarted: it counts from zero. */
function increase(before: number, after: number): number {
  return after >= before ? after - before : after;
}

export function ratesOf(before: Sample, after: Sample): Rates {
  const seconds = Math.max(0.001, (after.atMs - before.atMs) / 1000);
  const begun = increase(before.firstTokenCount, after.firstTokenCount);
  return {
    generatedPerS: increase(before.generationTokens, after.generationTokens) / seconds,
    promptPerS: increase(before.promptTokens, after.promptTokens) / seconds,
    firstTokenS: begun > 0 ? increase(before.firstTokenSumS, after.firstTokenSumS) / begun : null,
  };
}

/** The points of a small plot, `width` x `height`, newest at the right edge; `n` samples fill it. */
export function plotPoints(
  values: readonly number[],
  box: { width: number; height: number; n: number; max: number },
): string {
  const top = Math.max(box.max, ...values) || 1;
  const step = box.width / Math.max(1, box.n - 1);
  const first = box.width - step * (values.length - 1);
  return values
    .map(
      (value, i) =>
        `${(first + i * step).toFixed(1)},${(box.height - (value / top) * box.height).toFixed(1)}`,
    )
    .join(" ");
}
