// What is known of the server: its models, whether it answers, its figures. The key lives here; the browser stores it only
// if the user asks for that.

import type { Db } from "../lib/db";
import { ApiError, fetchMetrics, listModels, type Model } from "../lib/api";
import { ratesOf, sampleOf, type Rates, type Sample } from "../lib/metrics";
import { poll } from "../lib/task";

const RETRY_MS = 2000;
const POLL_MS = 1000;
const KEY = "api_key";
const SPEEDS = "speeds";
export const SAMPLES = 60;

export type Status = "connecting" | "ready" | "locked" | "loading" | "gone";

export interface Point {
  sample: Sample;
  rates: Rates | null;
}

export class Server {
  key = $state("");
  /** The browser stores the key. */
  isKeyStored = $state(false);
  /** The server has answered 401 to the key. */
  isKeyRejected = $state(false);
  status = $state<Status>("connecting");
  models = $state.raw<readonly Model[]>([]);
  /** The server can generate answers in the background. */
  storesResponses = $state(false);
  /** Tokens per second of the last answer of each model in this browser. */
  speeds = $state.raw<Readonly<Record<string, number>>>({});
  points = $state.raw<readonly Point[]>([]);
  #timer: ReturnType<typeof setTimeout> | undefined;
  #newest = 0;
  #db: Db | null = null;

  /** Connects, with the key that the browser stores if there is one. */
  async load(db: Db | null): Promise<void> {
    this.#db = db;
    this.key = (await db?.value<string>(KEY)) ?? "";
    this.isKeyStored = this.key !== "";
    this.speeds = (await db?.value<Record<string, number>>(SPEEDS)) ?? {};
    void this.connect();
  }

  /** The model that a request with this setting goes to: the named one if it is served, else the first. */
  model(wanted: string): Model | null {
    return this.models.find(({ id }) => id === wanted) ?? this.models[0] ?? null;
  }

  /** Notes how fast an answer came. */
  setSpeed(model: string, tokensPerS: number): void {
    this.speeds = { ...this.speeds, [model]: tokensPerS };
    void this.#db?.putValue(SPEEDS, this.speeds);
  }

  /** Asks for the models; goes on asking while there is no server or the model loads. The newest question counts. */
  async connect(): Promise<void> {
    clearTimeout(this.#timer);
    const asked = ++this.#newest;
    try {
      const { models, storesResponses } = await listModels(this.key);
      if (asked !== this.#newest) return;
      this.models = models;
      this.storesResponses = storesResponses;
      this.status = "ready";
      this.isKeyRejected = false;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (asked !== this.#newest) return;
      if (error.status === 401) this.#lock();
      else {
        this.status = error.code === "model_loading" ? "loading" : "gone";
        this.#timer = setTimeout(() => void this.connect(), RETRY_MS);
      }
    }
  }

  #lock(): void {
    this.status = "locked";
    this.isKeyRejected = this.key !== "";
  }

  /** Takes note of what went wrong with a request. */
  noticed(error: ApiError): void {
    if (error.status === 401) this.#lock();
    else if (error.code === "unreachable") {
      this.status = "gone";
      void this.connect();
    }
  }

  /** Connects with this key, which the browser stores if `isStored`. */
  async unlock(key: string, isStored: boolean): Promise<void> {
    this.key = key.trim();
    this.isKeyRejected = false;
    const connected = this.connect();
    await (isStored && this.key !== "" ? this.#storeKey() : this.forgetKey());
    await connected;
  }

  async #storeKey(): Promise<void> {
    this.isKeyStored = this.#db !== null;
    await this.#db?.putValue(KEY, this.key);
  }

  /** Takes the key out of the browser's store; this page keeps it until it is closed or reloaded. */
  async forgetKey(): Promise<void> {
    this.isKeyStored = false;
    await this.#db?.deleteValue(KEY);
  }

  /** Reads the figures once a second until the returned function is called. */
  watch(): () => void {
    return poll(POLL_MS, async () => {
      try {
        const sample = sampleOf(await fetchMetrics(this.key), Date.now());
        const before = this.points.at(-1)?.sample;
        const rates = before ? ratesOf(before, sample) : null;
        this.points = [...this.points, { sample, rates }].slice(-SAMPLES);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        this.noticed(error);
      }
      return true;
    });
  }
}

export const server = new Server();
