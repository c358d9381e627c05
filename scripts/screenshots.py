"""Take the README's screenshots of the web UI, with greedy completions of SmolLM2. Review them before a
commit."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from chatpage import FLAGS, Chat, find_browser  # noqa: E402 -- the tests' folder is on the path only now
from serving import Server, serving  # noqa: E402 -- as above

OUT = ROOT / "docs" / "screenshots"
BYTES_MAX = 200_000
OTHERS = ("Name three rivers of France", "What is a KV cache?", "Translate “good morning” to Italian")
MAIN = (
    "What does the Fibonacci sequence begin with?",
    "Write a Python function that returns the first n Fibonacci numbers, with a short explanation.",
)


def shoot(chat: Chat, name: str) -> None:
    """Take a screenshot of at most BYTES_MAX bytes."""
    path = OUT / f"{name}.png"
    chat.page.mouse.move(0, 0)
    chat.page.screenshot(path=path, animations="disabled", caret="hide")
    size = path.stat().st_size
    assert size <= BYTES_MAX, f"{path} has {size} bytes, {BYTES_MAX} is the limit"


def complete(chat: Chat, message: str, max_tokens: int) -> None:
    """Send a message and wait for its greedy completion."""
    chat.reach_server()
    chat.with_fields(temperature=0, max_tokens=max_tokens)
    chat.page.get_by_role("textbox", name="Message").fill(message)
    chat.button("Send").click()  # Enter breaks the line on a phone
    expect(chat.completion.locator(".usage")).to_be_visible(timeout=120_000)


def desktop(browser: Browser, server: Server) -> None:
    """Take screenshots of one conversation: light theme with the status panel, dark theme without."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    chat = Chat.open(context, server.url)
    for message in OTHERS:
        complete(chat, message, 24)
        chat.button("New chat").first.click()
    chat.menu("KV cache", "Pin")
    for message in MAIN:
        complete(chat, message, 230)
    chat.button("Server status").click()
    complete(chat, "Thank you. Which numbers come after 55 and 89?", 60)
    expect(chat.page.get_by_role("complementary").locator("polyline").first).to_be_attached()
    shoot(chat, "light")
    chat.button("Server status").click()
    chat.page.emulate_media(color_scheme="dark")
    shoot(chat, "dark")
    context.close()


def phone(browser: Browser, server: Server) -> None:
    """Take a screenshot of one conversation on a narrow screen."""
    context = browser.new_context(
        viewport={"width": 390, "height": 780}, device_scale_factor=2, has_touch=True, is_mobile=True
    )
    chat = Chat.open(context, server.url)
    complete(chat, "Explain how tides work, in a few sentences.", 120)
    shoot(chat, "phone")
    context.close()


def main() -> None:
    """Take all screenshots."""
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        with serving(Path(folder), "smollm2", "--num-kv-cells", "8192") as server:
            desktop(browser, server)
            phone(browser, server)
        browser.close()


if __name__ == "__main__":
    main()
