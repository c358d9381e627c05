/** Resolves in a task of its own: others, frames and input among them, come first. */
export function nextTask(): Promise<void> {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

/** Calls `read` now, and `ms` after each of its ends, until it resolves to false or the returned function is called. */
export function poll(ms: number, read: () => Promise<boolean>): () => void {
  let timer: ReturnType<typeof setTimeout>;
  let ended = false;
  const next = async () => {
    ended = !(await read()) || ended;
    if (!ended) timer = setTimeout(() => void next(), ms);
  };
  void next();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}

/** Resolves after some time; rejects with the signal's reason when it aborts. */
export function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason as Error);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, ms);
    if (signal.aborted) stop();
    else signal.addEventListener("abort", stop, { once: true });
  });
}
