import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { nextTask } from "../src/lib/task";
import { batched } from "../src/state/frames";

let asked: (() => void)[] = [];
/** Lets the next frame begin; false if none was asked for. */
const frame = () => asked.shift()?.() ?? false;

beforeEach(() => {
  asked = [];
  vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout", "performance"] });
  vi.stubGlobal("document", { hidden: false });
  vi.stubGlobal("requestAnimationFrame", (run: () => void) => asked.push(run));
  vi.stubGlobal("cancelAnimationFrame", () => (asked = []));
});
afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

describe("drawing", () => {
  it("happens once a frame however often it is asked", async () => {
    const draw = vi.fn();
    const frames = batched(draw);
    for (let i = 0; i < 5; i++) frames.ask();
    expect(asked).toHaveLength(1);
    frame();
    expect(draw).toHaveBeenCalledTimes(1);
    await nextTask();
    expect(frame()).toBe(false);
  });

  it("rests three times as long as its frame took", async () => {
    const frames = batched(() => vi.advanceTimersByTime(20));
    frames.ask();
    frame();
    frames.ask(); // while layout and paint are to come
    expect(asked).toHaveLength(0);
    vi.advanceTimersByTime(30);
    await nextTask();
    vi.advanceTimersByTime(149);
    expect(asked).toHaveLength(0);
    vi.advanceTimersByTime(1);
    expect(asked).toHaveLength(1);
  });

  it("rests a second at most, and not before the end", async () => {
    const draw = vi.fn(() => vi.advanceTimersByTime(5000));
    const frames = batched(draw);
    frames.ask();
    frame();
    await nextTask();
    frames.ask();
    vi.advanceTimersByTime(1000);
    expect(asked).toHaveLength(1);
    frames.now();
    expect(draw).toHaveBeenCalledTimes(2);
    await nextTask();
    expect(frame()).toBe(false);
  });

  it("goes on by a timer when the page is hidden", () => {
    const draw = vi.fn();
    const frames = batched(draw);
    frames.ask();
    vi.advanceTimersByTime(250); // the frame never came
    expect(draw).toHaveBeenCalledTimes(1);
  });
});
