"""Copying, also over plain http on another host, where the browser has no clipboard API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, expect, sync_playwright

from chatpage import FLAGS, Chat, find_browser
from serving import GOLDENS, Server, serving

HOST = "lan.test"
CODE = "```python\nprint(1)\n```"


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the tiny model under a name that is not this machine's loopback."""
    flags = ("--allowed-hosts", HOST)
    with serving(tmp_path_factory.mktemp("lan"), str(GOLDENS / "qwen2-tied-bf16"), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def lan_context() -> Iterator[BrowserContext]:
    """Return a context of a browser that resolves the name to this machine."""
    with sync_playwright() as playwright:
        flags = [*FLAGS, f"--host-resolver-rules=MAP {HOST} 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=find_browser(), args=flags)
        yield browser.new_context()
        browser.close()


@pytest.fixture
def insecure(lan: Server, lan_context: BrowserContext) -> Iterator[Chat]:
    """Open the web UI in an insecure context."""
    chat = Chat.open(lan_context, lan.url.replace("127.0.0.1", HOST))
    assert chat.page.evaluate("[isSecureContext, navigator.clipboard]") == [False, None]
    yield chat
    chat.page.close()


def test_copying_works_over_plain_http_on_another_host(insecure: Chat) -> None:
    """Both copy buttons fill the clipboard, as pasting shows."""
    insecure.complete_with(f"**bold** 天\n\n{CODE}")
    insecure.send("q")
    insecure.done()
    insecure.text.get_by_role("button", name="Copy").click()
    expect(insecure.text.get_by_role("button", name="Copied")).to_be_visible()
    insecure.message.press("Control+V")
    expect(insecure.message).to_have_value("print(1)")
    insecure.message.fill("")
    insecure.completion.locator("footer").get_by_role("button", name="Copy").click()
    expect(insecure.completion.locator("footer").get_by_role("button", name="Copied")).to_be_visible()
    insecure.message.press("Control+V")
    expect(insecure.message).to_have_value(f"**bold** 天\n\n{CODE}")


def test_a_refused_copy_is_said(insecure: Chat) -> None:
    """A browser that refuses both ways is not shown as a success."""
    insecure.complete_with("yes")
    insecure.send("q")
    insecure.done()
    insecure.page.evaluate("document.execCommand = () => false")
    insecure.completion.get_by_role("button", name="Copy").click()
    expect(insecure.page.get_by_text("The browser did not allow copying.")).to_be_visible()
    expect(insecure.completion.get_by_role("button", name="Copied")).to_have_count(0)
