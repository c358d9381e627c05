"""Benchmark the web UI in Chromium, on a server that replays a recorded completion at 200 tokens per second.

usage: ui.py [--runs 7]

Each run is a new browser profile. It measures first paint and bytes of the first load, and opening a session
of 2,000 messages. While a completion streams, it measures long tasks (the browser's own entries, over 50 ms),
frames per second, the main thread's time in script and layout, and nodes of finished blocks that changed.
Writes benches/results/ui.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, expect, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from chatpage import FLAGS, REMEMBER, Chat, find_browser  # noqa: E402 -- the tests' folder is on the path only now
from peers import cpu_name  # noqa: E402 -- as above
from replay import TOKENS_PER_S, pieces  # noqa: E402 -- as above

LONG_CHAT = 2000
# The nodes of the first part of the completion are compared before and after the rest of the stream.
BLOCKS_PER_PART = 7
WATCH = """
() => {
    window.long = [];
    window.frames = 0;
    new PerformanceObserver((list) => long.push(...list.getEntries().map(({ duration }) => duration)))
        .observe({ type: "longtask" });
    const count = () => { frames++; requestAnimationFrame(count); };
    requestAnimationFrame(count);
    window.started = performance.now();
}
"""


@contextmanager
def replay_server() -> Iterator[str]:
    """Its address."""
    command = [sys.executable, str(ROOT / "tests" / "replay.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def long_chat() -> str:
    """Return an export with one session of LONG_CHAT messages."""
    text = "".join(pieces())[:600]
    messages = [
        {
            "id": f"m{i}",
            "parent": f"m{i - 1}" if i else None,
            "role": "assistant" if i % 2 else "user",
            "content": f"Message {i}. " + (text if i % 2 else "And then?"),
            "createdMs": i + 1,
        }
        for i in range(LONG_CHAT)
    ]
    return json.dumps(
        {"format": "llaisys-chats", "version": 1, "chats": [{"title": "long", "messages": messages}]}
    )


def one_run(browser: Browser, url: str) -> dict[str, Any]:
    """Measure everything once, in a new profile."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(60_000)
    chat = Chat.open(context, url)
    painted = "() => performance.getEntriesByName('first-contentful-paint').length > 0"
    chat.page.wait_for_function(painted)  # an element in the DOM may not be painted yet
    figures: dict[str, Any] = chat.page.evaluate(
        """() => {
            const files = ["navigation", "resource"].flatMap((type) => performance.getEntriesByType(type));
            return {
                first_paint_ms: performance.getEntriesByName("first-contentful-paint")[0].startTime,
                bytes_first_load: files.reduce((sum, { encodedBodySize }) => sum + encodedBodySize, 0),
            };
        }"""
    )
    file = {"name": "long.json", "mimeType": "application/json", "buffer": long_chat().encode()}
    chat.page.locator("input[type=file]").set_input_files(file)
    expect(chat.completion).to_contain_text(f"Message {LONG_CHAT - 1}.")
    chat.button("New chat").first.click()
    figures["open_long_chat_ms"] = chat.page.evaluate(
        """async (last) => {
            const start = performance.now();
            document.querySelector("nav a").click();
            const isThere = () => document.querySelector("main").textContent.includes(last);
            while (!isThere()) await new Promise(requestAnimationFrame);
            return performance.now() - start;
        }""",
        f"Message {LONG_CHAT - 1}.",
    )
    chat.button("New chat").first.click()
    devtools = context.new_cdp_session(chat.page)
    devtools.send("Performance.enable")
    chat.page.evaluate(WATCH)
    before = busy(devtools.send("Performance.getMetrics"))
    chat.send("How is a tide table made?")
    chat.page.wait_for_function(
        "(n) => document.querySelectorAll('.block').length > n", arg=2 * BLOCKS_PER_PART, timeout=60_000
    )
    chat.text.locator(f".block:nth-child(-n + {BLOCKS_PER_PART})").evaluate_all(REMEMBER)
    expect(chat.completion.locator(".usage")).to_contain_text("complete", timeout=120_000)
    after = busy(devtools.send("Performance.getMetrics"))
    streamed = chat.page.evaluate(
        "({ n: long.length, worst: Math.max(0, ...long), frames, s: (performance.now() - started) / 1000 })"
    )
    figures |= {
        "long_tasks": streamed["n"],
        "worst_task_ms": streamed["worst"],
        "frames_per_s": streamed["frames"] / streamed["s"],
        "stream_s": streamed["s"],
        "finished_nodes_changed": chat.page.evaluate("lost()"),
        **{f"{name}_share": (after[name] - before[name]) / streamed["s"] for name in after},
    }
    assert chat.text.inner_text()
    context.close()
    return figures


def busy(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the main thread's seconds in script and in layout and style."""
    values = {entry["name"]: entry["value"] for entry in metrics["metrics"]}
    layout = values["LayoutDuration"] + values["RecalcStyleDuration"]
    return {"script": values["ScriptDuration"], "layout": layout}


def main() -> None:
    """Print medians; write every run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "results" / "ui.json")
    args = parser.parse_args()
    with replay_server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        version = browser.version
        runs = [one_run(browser, url) for _ in range(args.runs)]
        browser.close()
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for name, value in medians.items():
        print(f"{name:20} {value:10.2f}")
    out = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_name(), "system": platform.platform(), "chromium": version},
        "tokens": len(pieces()),
        "tokens_per_s": TOKENS_PER_S,
        "medians": medians,
        "runs": runs,
    }
    args.out.write_text(json.dumps(out, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
