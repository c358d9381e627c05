"""Take the screenshots of the documentation, at twice the resolution. Review them before a commit.

The answers are scripted (`tests/clients/scripted_server.py`), because SmolLM2 is too small to write them.
Everything else is real: template, tokenizer, engine, forward pass and figures are those of the server.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from chatpage import FLAGS, Chat, find_browser  # noqa: E402 -- the tests' folder is on the path only now
from serving import NO_SPECULATION, Server, serving  # noqa: E402 -- as above

OUT = ROOT / "docs" / "screenshots"
BYTES_MAX = 500_000
SORTS = "Compare three sorting algorithms in a table, and show merge sort in Python."
SORTS_TEXT = """\
| Algorithm | Average | Worst case | Memory | Stable |
|---|---|---|---|---|
| Quicksort | n log n | n² | log n | no |
| Merge sort | n log n | n log n | n | yes |
| Heapsort | n log n | n log n | 1 | no |

Merge sort splits the list in half, sorts both halves and merges them:

```python
def merge_sort(items: list[int]) -> list[int]:
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    left, right = merge_sort(items[:middle]), merge_sort(items[middle:])
    merged = []
    while left and right:
        merged.append((left if left[0] <= right[0] else right).pop(0))
    return merged + left + right
```"""
COST = "How many comparisons does it need?"
COST_TEXT = """\
<think>
Let T(n) be the comparisons for n items. Merging takes at most n - 1 of them. Unroll it for n = 2^k.
</think>

Merging two halves takes at most $n - 1$ comparisons, so

$$T(n) = 2\\,T\\!\\left(\\frac{n}{2}\\right) + n - 1, \\qquad T(1) = 0.$$

For $n = 2^k$ the $k$ levels of the recursion add up to

$$T(n) = \\sum_{i=0}^{k-1} 2^i \\left(\\frac{n}{2^i} - 1\\right) = n \\log_2 n - n + 1.$$

For 1,024 items these are at most **9,217** comparisons."""
SKY = "为什么天空是蓝色的？"
SKY_TEXT = """\
因为大气对蓝光的**散射**更强。

1. 阳光包含各种颜色的光。
2. 空气分子比光的波长小得多，散射强度与波长的四次方成反比（瑞利散射）。
3. 蓝光的波长约 450 纳米，红光约 700 纳米，所以蓝光的散射约是红光的六倍。

于是从天空各个方向来的多是蓝光。日落时阳光穿过的大气更厚，蓝光已经散射掉，剩下的就偏红。"""
OTHERS = {
    "Plan a weekend in Lisbon": "Start in Alfama, take tram 28, and have dinner near the river.",
    "What is a KV cache?": "It keeps the keys and values of earlier tokens, so that they are computed once.",
    "Translate “good morning” to Italian": "Buongiorno.",
}
DRAFTS = {
    "Name a project about tides.": "Ebb and Flow",
    "Name a project about tides, in one word.": "Springtide",
    "Name a project about tides, in Latin.": "Aestus",
}


def script() -> list[dict[str, str]]:
    """Return the completion of each prompt; later turns come first, because prompts contain earlier ones."""
    turns = {COST: COST_TEXT, SORTS: SORTS_TEXT, SKY: SKY_TEXT, **OTHERS, **DRAFTS}
    return [{"after": re.escape(message), "text": text} for message, text in turns.items()]


def shoot(chat: Chat, name: str) -> None:
    """Take a screenshot of at most BYTES_MAX bytes."""
    path = OUT / f"{name}.png"
    chat.page.mouse.move(0, 0)
    chat.page.screenshot(path=path, animations="disabled", caret="hide")
    size = path.stat().st_size
    assert size <= BYTES_MAX, f"{path} has {size} bytes, {BYTES_MAX} is the limit"


def complete(chat: Chat, message: str) -> None:
    """Send a message and wait for its completion."""
    chat.page.get_by_role("textbox", name="Message").fill(message)
    chat.button("Send").click()  # Enter breaks the line on a phone
    expect(chat.completion.locator(".usage")).to_be_visible(timeout=120_000)


def desktop(browser: Browser, server: Server) -> None:
    """Take a map of branches, a table and code with the status panel, and formulas in the dark theme."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 800}, device_scale_factor=2, color_scheme="light"
    )
    chat = Chat.open(context, server.url)
    for message in OTHERS:
        complete(chat, message)
        chat.button("New chat").first.click()
    chat.menu("KV cache", "Pin")
    first, *others = DRAFTS
    complete(chat, first)
    for message in others:
        chat.user_messages.first.get_by_role("button", name="Edit message").click()
        chat.page.get_by_role("textbox", name="Edit message").fill(message)
        chat.page.get_by_role("textbox", name="Edit message").press("Control+Enter")
        expect(chat.completion).to_contain_text(DRAFTS[message])
        expect(chat.completion.locator(".usage")).to_be_visible(timeout=120_000)
    chat.page.keyboard.press("Control+Shift+L")
    expect(chat.page.get_by_role("dialog")).to_be_visible()
    shoot(chat, "branches")
    chat.page.keyboard.press("Escape")
    chat.button("New chat").first.click()
    chat.button("Server status").click()
    complete(chat, SORTS)
    expect(chat.page.get_by_role("complementary").locator("polyline").first).to_be_attached()
    shoot(chat, "light")
    chat.button("Server status").click()
    complete(chat, COST)
    chat.page.get_by_text("Reasoning").last.click()
    chat.page.emulate_media(color_scheme="dark")
    shoot(chat, "dark")
    context.close()


def phone(browser: Browser, server: Server) -> None:
    """Take a Chinese chat on a narrow screen."""
    context = browser.new_context(
        viewport={"width": 390, "height": 780},
        device_scale_factor=2,
        has_touch=True,
        is_mobile=True,
        locale="zh-CN",
    )
    chat = Chat(context.new_page(), server.url)
    chat.page.goto(server.url)
    chat.page.get_by_role("textbox", name="消息").fill(SKY)
    chat.button("发送").click()
    expect(chat.page.locator(".usage")).to_be_visible(timeout=120_000)
    shoot(chat, "phone")
    context.close()


def main() -> None:
    """Take all screenshots."""
    if not subprocess.run(["fc-list", ":lang=zh"], capture_output=True, check=True).stdout:
        sys.exit("the Chinese screenshot needs a font: apt-get install fonts-noto-cjk")
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        texts = Path(folder) / "script.json"
        texts.write_text(json.dumps(script()), "utf-8")
        program = (sys.executable, str(ROOT / "tests" / "clients" / "scripted_server.py"), str(texts))
        flags = ("--num-kv-cells", "8192", "--reasoning-parser", "qwen3", *NO_SPECULATION)
        browser = playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        with serving(Path(folder), "smollm2", *flags, program=program) as server:
            desktop(browser, server)
            phone(browser, server)
        browser.close()


if __name__ == "__main__":
    main()
