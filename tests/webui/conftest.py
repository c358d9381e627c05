"""The browser and the servers of the web UI tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

from chatpage import FLAGS, PATIENCE_MS, Chat, find_browser
from serving import GOLDENS, NO_SPECULATION, Server, long_model, serving

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a browser for one module, because its event loop conflicts with asynchronous tests."""
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        yield made
        made.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Return a new browser context without stored data."""
    made = browser.new_context(viewport={"width": 1280, "height": 800})
    made.set_default_timeout(PATIENCE_MS)
    made.grant_permissions(["clipboard-read", "clipboard-write"])
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the tiny model with a long context under two names and below /llm; four requests run."""
    folder = tmp_path_factory.mktemp("tiny")
    names = ("--served-model-name", "tiny", "--served-model-name", "other")
    flags = (
        *names,
        "--root-path",
        "/llm",
        "--num-kv-cells",
        "131072",
        "--max-num-seqs",
        "4",
        "--dtype",
        "float32",
        *NO_SPECULATION,
    )
    with serving(folder, str(long_model(folder)), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the tiny model with its own context of 512 tokens."""
    with serving(tmp_path_factory.mktemp("short"), str(GOLDENS / "qwen2-tied-bf16")) as server:
        yield server


@pytest.fixture
def chat(tiny: Server, context: BrowserContext) -> Iterator[Chat]:
    """Open the web UI on the tiny model. At the end no request is left running."""
    made = Chat.open(context, tiny.url)
    yield made
    made.page.close()
    tiny.until("vllm:num_requests_running", 0)


@pytest.fixture(scope="session")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve SmolLM2, for tests that act while it generates: pages cannot keep up with the tiny model."""
    flags = ("--num-kv-cells", "16384", "--max-num-seqs", "4", *NO_SPECULATION)
    with serving(tmp_path_factory.mktemp("steady"), "smollm2", *flags) as server:
        yield server


@pytest.fixture
def steady_chat(steady: Server, context: BrowserContext) -> Iterator[Chat]:
    """Open the web UI on SmolLM2, whose completions go on until they are stopped."""
    made = Chat.open(context, steady.url)
    made.with_fields(ignore_eos=True)
    yield made
    made.page.close()
    steady.until("vllm:num_requests_running", 0)


@pytest.fixture
def fed(tiny: Server, context: BrowserContext) -> Iterator[Chat]:
    """Open the web UI with streams that the test produces."""
    made = Chat.open(context, tiny.url, feed=True)
    yield made
    made.page.close()
