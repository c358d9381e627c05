"""One browser and one server of each kind for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

from chatpage import FLAGS, PATIENCE_MS, Chat, find_browser
from serving import GOLDENS, Server, long_model, serving

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A module long: asynchronous tests cannot run beside the event loop that Playwright has here."""
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        yield made
        made.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser that has never seen the page."""
    made = browser.new_context(viewport={"width": 1280, "height": 800})
    made.set_default_timeout(PATIENCE_MS)
    made.grant_permissions(["clipboard-read", "clipboard-write"])
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model under two names; answers may be very long, and four run at once."""
    folder = tmp_path_factory.mktemp("tiny")
    names = ("--served-model-name", "tiny", "--served-model-name", "other")
    flags = (*names, "--num-kv-cells", "131072", "--max-num-seqs", "4", "--dtype", "float32")
    with serving(folder, str(long_model(folder)), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model with its own context of 512 tokens."""
    with serving(tmp_path_factory.mktemp("short"), str(GOLDENS / "qwen2-tied-bf16")) as server:
        yield server


@pytest.fixture
def chat(tiny: Server, context: BrowserContext) -> Iterator[Chat]:
    """A new page on the tiny model. Whatever a test does, the policy holds and nothing is left running."""
    made = Chat.open(context, tiny.url)
    yield made
    made.page.close()
    tiny.until("vllm:num_requests_running", 0)


@pytest.fixture
def fed(tiny: Server, context: BrowserContext) -> Iterator[Chat]:
    """A new page whose streams are the test's own."""
    made = Chat.open(context, tiny.url, feed=True)
    yield made
    made.page.close()
