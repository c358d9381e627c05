import { nextTask } from "../lib/task";

const HIDDEN_MS = 250;
// After a frame that took so long the next one waits this many times as long: drawing leaves most of the main thread
// to the stream and to the reader, also on a busy machine.
const REST = 3;
const REST_MAX_MS = 1000;

/**
 * Runs `draw` before a frame however often it is asked, and less often the longer a frame takes with its layout and
 * paint. A hidden page, which has no frames, draws slowly. `now` draws at once.
 */
export function batched(draw: () => void): { ask: () => void; now: () => void } {
  let isAsked = false;
  /** Null while a frame is in progress: its end plans the next one. */
  let freeMs: number | null = 0;
  let cancel = () => {};

  const now = () => {
    cancel();
    isAsked = false;
    freeMs = null;
    const startMs = performance.now();
    draw();
    // Layout and paint of the frame in progress come before any task.
    void nextTask().then(() => {
      const endMs = performance.now();
      freeMs = endMs + Math.min(REST * (endMs - startMs), REST_MAX_MS);
      if (isAsked) plan(freeMs);
    });
  };
  const plan = (fromMs: number) => {
    cancel();
    const restMs = Math.max(0, fromMs - performance.now());
    // A page may be hidden after it asked for a frame that then never comes: the timer is there in both cases.
    const timers = [setTimeout(now, restMs + HIDDEN_MS)];
    let frame = 0;
    const askFrame = () => {
      if (!document.hidden) frame = requestAnimationFrame(now);
    };
    if (restMs > 0) timers.push(setTimeout(askFrame, restMs));
    else askFrame();
    cancel = () => {
      timers.forEach(clearTimeout);
      cancelAnimationFrame(frame);
    };
  };
  const ask = () => {
    if (isAsked) return;
    isAsked = true;
    if (freeMs !== null) plan(freeMs);
  };
  return { ask, now };
}
