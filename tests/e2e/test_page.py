"""The page in a real browser against a real server: it streams a chat, stops, and shows errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from serving import GOLDENS, Server, serving

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
        made = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield made
        made.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser's console says: a violated policy would be there."""
    return []


@pytest.fixture
def page(tiny: Server, browser: Browser, complaints: list[str]) -> Iterator[Page]:
    made = browser.new_page()
    made.on("console", lambda message: complaints.append(message.text))
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.goto(tiny.url)
    expect(made.get_by_label("Model")).to_have_text("tiny")
    yield made
    made.close()
    tiny.until("vllm:num_requests_running", 0)


def answer_with(page: Page, content: str) -> None:
    """Lets the server answer every chat with this, cut into frames of one character."""
    frames = "".join(
        f'data: {{"choices":[{{"delta":{{"content":"\\u{ord(c):04x}"}}}}]}}\n\n' for c in content
    )
    usage = 'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    headers = {"content-type": "text/event-stream"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=frames + usage, headers=headers))


def send(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def test_a_real_answer_streams_and_stops(page: Page, tiny: Server, complaints: list[str]) -> None:
    """The tiny model is made to talk until its context ends; stopping frees it, and the text so far stays."""

    def endless(route: Route) -> None:
        asked = route.request.post_data_json
        route.continue_(post_data=json.dumps({**asked, "ignore_eos": True}))

    page.route("**/v1/chat/completions", endless)
    send(page, "Hello")
    answer = page.get_by_label("Assistant")
    expect(answer).not_to_be_empty()
    tiny.until("vllm:num_requests_running", 1)
    page.get_by_role("button", name="Stop").click()
    tiny.until("vllm:num_requests_running", 0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(answer).not_to_be_empty()
    expect(page.get_by_role("alert")).to_be_hidden()
    assert complaints == []


def test_text_stays_text(page: Page, complaints: list[str]) -> None:
    hostile = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    answer_with(page, hostile)
    send(page, hostile)
    expect(page.get_by_label("Assistant")).to_have_text(hostile)
    expect(page.get_by_label("You")).to_have_text(hostile)
    assert page.title() == "LLAISYS"
    assert page.locator("main img, main script").count() == 0
    assert complaints == []


def test_the_conversation_is_sent_along(page: Page) -> None:
    answer_with(page, "Hi 天")
    send(page, "first")
    expect(page.get_by_label("Assistant")).to_have_text("Hi 天")
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "second")
    sent = asked.value.post_data_json
    assert [message["content"] for message in sent["messages"]] == ["first", "Hi 天", "second"]
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_label("Assistant")).to_have_count(0)
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "third")
    assert len(asked.value.post_data_json["messages"]) == 1


def test_shift_enter_is_a_new_line(page: Page) -> None:
    text = page.get_by_label("Message")
    text.fill("one")
    text.press("Shift+Enter")
    text.press_sequentially("two")
    expect(text).to_have_value("one\ntwo")
    expect(page.get_by_label("You")).to_have_count(0)


def test_an_error_is_shown_and_the_question_kept(page: Page) -> None:
    send(page, "word " * 30_000)
    expect(page.get_by_role("alert")).to_contain_text("65536")
    expect(page.get_by_label("You")).to_have_count(0)
    expect(page.get_by_label("Message")).to_have_value("word " * 29_999 + "word")


def test_an_error_inside_a_stream_keeps_what_came(page: Page) -> None:
    piece, error = '{"choices":[{"delta":{"content":"Hel"}}]}', '{"error":{"message":"It broke."}}'
    body = f"data: {piece}\n\ndata: {error}\n\ndata: [DONE]\n\n"
    headers = {"content-type": "text/event-stream"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, headers=headers))
    send(page, "Hello")
    expect(page.get_by_role("alert")).to_have_text("It broke.")
    expect(page.get_by_label("Assistant")).to_have_text("Hel")


def test_a_server_that_is_gone(page: Page) -> None:
    def fail(route: Route) -> None:
        route.abort()

    page.route("**/v1/chat/completions", fail)
    send(page, "Hello")
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_follows_the_scheme(page: Page, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.set_viewport_size({"width": width, "height": 640})
    answer_with(page, "x" * 300)
    send(page, "y" * 300)
    expect(page.get_by_label("Assistant")).to_have_text("x" * 300)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_key_is_asked_for_and_kept_in_memory_only(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, str(GOLDENS / "qwen2-tied-bf16"), key="secret-1") as server:
        page = browser.new_page()
        page.goto(server.url)
        expect(page.get_by_role("alert")).to_contain_text("API key")
        page.get_by_label("API key", exact=True).fill("secret-1")
        page.get_by_label("API key", exact=True).press("Enter")
        expect(page.get_by_label("Model")).to_have_text("qwen2-tied-bf16")
        send(page, "Hello")
        expect(page.get_by_label("Assistant")).not_to_be_empty()
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        page.close()
