// The server's requests of the last minute, read once a second while they are shown.

import { ApiError, listRequests } from "../lib/api";
import { WINDOW_MS, type RequestTimeline } from "../lib/lanes";
import { poll } from "../lib/task";
import { server } from "./server.svelte";

const POLL_MS = 1000;
const LANES_MAX = 16;

class Lanes {
  /** Newest last, as they arrived. */
  requests = $state.raw<readonly RequestTimeline[]>([]);
  /** The server's clock, since 1970. */
  nowMs = $state(0);

  /** Reads until the returned function is called. A server that does not list its requests is not asked again. */
  watch(): () => void {
    return poll(POLL_MS, async () => {
      try {
        const { nowMs, requests } = await listRequests(WINDOW_MS / 1000, LANES_MAX, server.key);
        this.nowMs = nowMs;
        this.requests = requests.reverse();
        return true;
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        return error.status !== 404;
      }
    });
  }
}

export const lanes = new Lanes();
