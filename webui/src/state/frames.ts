const HIDDEN_MS = 250;

/** Runs `draw` once before the next frame however often it is asked; a hidden page, which has none, draws slowly. */
export function batched(draw: () => void): { ask: () => void; now: () => void } {
  let isAsked = false;
  let cancel = () => {};
  const now = () => {
    cancel();
    isAsked = false;
    draw();
  };
  const ask = () => {
    if (isAsked) return;
    isAsked = true;
    // A page may be hidden after it asked for a frame that then never comes: the timer is there in both cases.
    const timer = setTimeout(now, HIDDEN_MS);
    const frame = document.hidden ? 0 : requestAnimationFrame(now);
    cancel = () => {
      clearTimeout(timer);
      cancelAnimationFrame(frame);
    };
  };
  return { ask, now };
}
