// What is known of the server: its models, whether it answers, its figures. The key lives here, in memory only.

import { ApiError, fetchMetrics, listModels, type Model } from "../lib/api";
import { ratesOf, sampleOf, type Rates, type Sample } from "../lib/metrics";

const RETRY_MS = 2000;
const POLL_MS = 1000;
export const SAMPLES = 60;

export type Status = "connecting" | "ready" | "locked" | "loading" | "gone";

export interface Point {
  sample: Sample;
  rates: Rates | null;
}

export class Server {
  key = $state("");
  status = $state<Status>("connecting");
  models = $state.raw<readonly Model[]>([]);
  points = $state.raw<readonly Point[]>([]);
  #timer: ReturnType<typeof setTimeout> | undefined;
  #newest = 0;

  /** The model that a request with this setting goes to: the named one if it is served, else the first. */
  model(wanted: string): Model | null {
    return this.models.find(({ id }) => id === wanted) ?? this.models[0] ?? null;
  }

  /** Asks for the models; goes on asking while there is no server or the model loads. The newest question counts. */
  async connect(): Promise<void> {
    clearTimeout(this.#timer);
    const asked = ++this.#newest;
    try {
      const models = await listModels(this.key);
      if (asked !== this.#newest) return;
      this.models = models;
      this.status = "ready";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (asked !== this.#newest) return;
      this.status = error.status === 401 ? "locked" : error.code === "model_loading" ? "loading" : "gone";
      if (this.status !== "locked") this.#timer = setTimeout(() => void this.connect(), RETRY_MS);
    }
  }

  /** Takes note of what went wrong with a request. */
  noticed(error: ApiError): void {
    if (error.status === 401) this.status = "locked";
    else if (error.code === "unreachable") {
      this.status = "gone";
      void this.connect();
    }
  }

  unlock(key: string): Promise<void> {
    this.key = key.trim();
    return this.connect();
  }

  /** Reads the figures once a second until the returned function is called. */
  watch(): () => void {
    let timer: ReturnType<typeof setTimeout>;
    let ended = false;
    const read = async () => {
      try {
        const sample = sampleOf(await fetchMetrics(this.key), Date.now());
        const before = this.points.at(-1)?.sample;
        const rates = before ? ratesOf(before, sample) : null;
        this.points = [...this.points, { sample, rates }].slice(-SAMPLES);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        this.noticed(error);
      }
      if (!ended) timer = setTimeout(() => void read(), POLL_MS);
    };
    void read();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }
}

export const server = new Server();
