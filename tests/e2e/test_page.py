"""The page in a real browser against a real server: it streams a chat, stops, starts anew, shows errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

pytestmark = pytest.mark.model
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, smollm2_server: str) -> Iterator[Page]:
    """A fresh page; nothing may be fetched from elsewhere and nothing may go wrong in the console."""
    page = browser.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on(
        "request", lambda r: None if r.url.startswith((smollm2_server, "data:")) else troubles.append(r.url)
    )
    page.on("console", lambda m: troubles.append(m.text) if "Content Security Policy" in m.text else None)
    page.goto(smollm2_server)
    expect(page.locator("#model")).to_have_text("smollm2")
    yield page
    page.close()
    assert troubles == []


def ask(page: Page, text: str) -> None:
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def test_a_chat_of_two_turns(page: Page) -> None:
    answers = page.locator("#log article.assistant")
    ask(page, "What is the capital of France?")
    expect(answers.nth(0)).to_contain_text("Paris", timeout=60_000)
    expect(page.locator("#send")).to_be_visible(timeout=60_000)
    ask(page, "And of Italy?")
    expect(answers.nth(1)).not_to_be_empty(timeout=60_000)
    expect(page.locator("#send")).to_be_visible(timeout=60_000)
    assert page.locator("#log article").count() == 4


def test_stop_keeps_what_came(page: Page) -> None:
    ask(page, "Write a very long story about the sea, with many chapters.")
    answer = page.locator("#log article.assistant")
    expect(answer).not_to_be_empty(timeout=60_000)
    page.locator("#stop").click()
    expect(page.locator("#send")).to_be_visible()
    kept = answer.inner_text()
    assert kept
    expect(answer).to_have_text(kept)
    expect(page.locator("#error")).to_be_hidden()


def test_new_chat_empties_the_log(page: Page) -> None:
    ask(page, "Say yes.")
    expect(page.locator("#send")).to_be_visible(timeout=60_000)
    page.locator("#new").click()
    assert page.locator("#log article").count() == 0


def test_markup_in_a_message_stays_text(page: Page) -> None:
    ask(page, "<img src=x onerror=\"document.title='broken'\">")
    expect(page.locator("#log article.user")).to_contain_text("<img src=x")
    page.locator("#stop").or_(page.locator("#send")).first.wait_for()
    assert page.locator("#log img").count() == 0
    assert page.title() == "LLAISYS"


def test_a_refusal_is_shown_and_the_question_comes_back(page: Page) -> None:
    question = "word " * 9000
    ask(page, question)
    expect(page.locator("#error")).to_be_visible(timeout=60_000)
    assert "8192" in page.locator("#error").inner_text() or "tokens" in page.locator("#error").inner_text()
    assert page.locator("#text").input_value().strip() == question.strip()
