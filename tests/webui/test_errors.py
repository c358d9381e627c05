"""Errors are shown in plain words, can be tried again, and lose no text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Route, expect

from chatpage import COMPLETIONS, Chat
from serving import GOLDENS, Server, serving


def test_a_busy_server_can_be_tried_again_after_a_countdown(chat: Chat) -> None:
    chat.page.clock.install()
    chat.reload()
    chat.fail_with(429, "server_overloaded", "all places are taken", **{"retry-after": "3000"})
    chat.send("Hello")
    expect(chat.page.get_by_role("alert")).to_contain_text("The server is busy")
    expect(chat.page.get_by_role("alert")).to_contain_text("all places are taken")
    waiting = chat.page.get_by_role("button", name=re.compile(r"Try again in [23]\d\d\d s"))
    expect(waiting).to_be_disabled()
    chat.complete_with("now it works")
    retry = chat.button("Try again")
    chat.page.clock.fast_forward("50:00")
    expect(retry).to_be_enabled()
    retry.click()
    expect(chat.text).to_have_text("now it works")
    expect(chat.completions).to_have_count(1)
    expect(chat.page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize(
    ("status", "code", "title"),
    [
        (408, "request_timeout", "The request took too long"),
        (500, "request_failed", "The request failed"),
        (503, "engine_dead", "The request failed"),
    ],
)
def test_an_error_is_shown_in_the_servers_words(chat: Chat, status: int, code: str, title: str) -> None:
    chat.fail_with(status, code, f"what the server says of {status}")
    chat.send("Hello")
    alert = chat.page.get_by_role("alert")
    expect(alert).to_contain_text(title)
    expect(alert).to_contain_text(f"what the server says of {status}")
    expect(chat.user_texts).to_have_text(["Hello"])
    chat.complete_with("yes")
    chat.button("Try again").click()
    expect(chat.text).to_have_text("yes")


def test_an_error_inside_a_stream_keeps_the_partial_completion(chat: Chat) -> None:
    piece = '{"choices":[{"delta":{"content":"Hel"}}]}'
    error = '{"error":{"message":"It broke.","code":"request_timeout"}}'
    body = f"data: {piece}\n\ndata: {error}\n\ndata: [DONE]\n\n"
    headers = {"content-type": "text/event-stream"}
    chat.page.route(COMPLETIONS, lambda route: route.fulfill(body=body, headers=headers))
    chat.send("Hello")
    expect(chat.page.get_by_role("alert")).to_contain_text("It broke.")
    expect(chat.text).to_have_text("Hel")
    chat.complete_with("lo")
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.button("Try again").click()
    assert request.value.post_data_json["continue_final_message"] is True
    expect(chat.text).to_have_text("Hello")


def test_a_truncated_stream_is_noticed(chat: Chat) -> None:
    body = 'data: {"choices":[{"delta":{"content":"Hel"}}]}\n\n'
    headers = {"content-type": "text/event-stream"}
    chat.page.route(COMPLETIONS, lambda route: route.fulfill(body=body, headers=headers))
    chat.send("Hello")
    expect(chat.page.get_by_role("alert")).to_contain_text("The connection ended before the answer did")
    expect(chat.text).to_have_text("Hel")
    expect(chat.completion.get_by_role("button", name="Continue")).to_be_visible()


def test_a_server_that_ends_and_is_started_again(context: BrowserContext, tmp_path: Path) -> None:
    """The message and the draft stay, and the web UI finds the next server on the port."""
    with serving(tmp_path, str(GOLDENS / "qwen2-tied-bf16")) as server:
        chat = Chat.open(context, server.url)
        port = server.url.rsplit(":", 1)[1]
        assert server.stop() == 0
    chat.send("are you there?")
    alert = chat.completion.get_by_role("alert")
    expect(alert).to_contain_text("The server cannot be reached")
    expect(chat.page.get_by_text("Trying again; your text is kept.")).to_be_visible()
    chat.message.fill("a draft")
    with serving(tmp_path, str(GOLDENS / "qwen2-tied-bf16"), "--port", port):
        expect(chat.page.get_by_text("Trying again; your text is kept.")).to_have_count(0)
        expect(chat.user_texts).to_have_text(["are you there?"])
        expect(chat.message).to_have_value("a draft")
        chat.with_fields(max_tokens=5, ignore_eos=True)
        chat.button("Try again").click()
        expect(chat.text).not_to_be_empty()
        chat.done()
        chat.page.close()


def test_a_too_long_message_is_rejected_with_both_numbers(short: Server, context: BrowserContext) -> None:
    chat = Chat.open(context, short.url)
    chat.send("word " * 400)
    alert = chat.page.get_by_role("alert")
    expect(alert).to_contain_text(re.compile(r"Too long: \d+ tokens asked for, the context holds 512"))
    chat.button("Drop the oldest turns and try again").click()
    expect(chat.page.get_by_text("There is no older turn to drop: shorten the message.")).to_be_visible()
    expect(chat.user_texts).to_have_text(["word " * 400])


def test_a_full_context_drops_its_oldest_turns(short: Server, context: BrowserContext) -> None:
    chat = Chat.open(context, short.url)
    chat.with_fields(max_tokens=100, ignore_eos=True, temperature=0)
    for i in range(8):
        chat.send(f"turn {i}: " + "a b c d " * 5)
        chat.done()
        if chat.page.get_by_role("alert").count():
            break
    expect(chat.page.get_by_role("alert")).to_contain_text("the context holds 512")
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.button("Drop the oldest turns and try again").click()
    sent = request.value.post_data_json["messages"]
    assert sent[0]["role"] == "user"
    assert not sent[0]["content"].startswith("turn 0")
    expect(chat.text).not_to_be_empty()
    chat.done()
    expect(chat.page.get_by_role("alert")).to_have_count(0)
    chat.reload()
    expect(chat.page.get_by_text("Not sent to the model above this line")).to_be_attached()


def test_a_completion_cut_by_the_context_is_marked(short: Server, context: BrowserContext) -> None:
    chat = Chat.open(context, short.url)
    chat.with_fields(max_tokens=60, ignore_eos=True, temperature=0)
    for i in range(2):
        chat.send(f"turn {i}")
        chat.done()
    chat.page.unroute(COMPLETIONS)
    chat.with_fields(ignore_eos=True, temperature=0)
    chat.send("go on for ever")
    expect(chat.page.get_by_text("The context is full: 512 of 512 tokens.")).to_be_visible()
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.button("Drop the oldest turns and go on").click()
    sent = request.value.post_data_json
    assert sent["continue_final_message"] is True
    assert sent["messages"][0]["content"] != "turn 0"
    assert sent["messages"][-2]["content"] == "go on for ever"


def test_a_key_is_asked_for_and_kept_in_memory_only(context: BrowserContext, tmp_path: Path) -> None:
    with serving(tmp_path, str(GOLDENS / "qwen2-tied-bf16"), key="secret-1") as server:
        page = context.new_page()
        page.goto(server.url)
        chat = Chat(page, server.url)
        expect(page.get_by_text("This server asks for an API key.")).to_be_visible()
        late: list[Route] = []

        def hold_the_wrong_one(route: Route) -> None:
            if route.request.headers.get("authorization") == "Bearer wrong":
                late.append(route)
            else:
                route.continue_()

        page.route("**/v1/models", hold_the_wrong_one)
        for key in ("wrong", "secret-1"):
            page.get_by_label("API key").fill(key)
            page.get_by_label("API key").press("Enter")
        expect(page.get_by_label("Model", exact=True)).to_be_visible()
        # The response to the older key arrives last, and has no effect.
        with page.expect_response("**/v1/models") as refused:
            late[0].continue_()
        assert refused.value.status == 401
        refused.value.finished()
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        expect(page.get_by_text("This server asks for an API key.")).to_have_count(0)
        chat.with_fields(max_tokens=5, ignore_eos=True)
        chat.send("Hello")
        expect(chat.text).not_to_be_empty()
        chat.done()
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        kept = page.evaluate(
            """async () => {
                const settled = (request) => new Promise((done) => {
                    request.onsuccess = ({ target }) => done(target.result);
                });
                const db = await settled(indexedDB.open("llaisys"));
                const read = (name) => settled(db.transaction(name).objectStore(name).getAll());
                const all = await Promise.all([...db.objectStoreNames].map(read));
                db.close();
                return JSON.stringify(all);
            }"""
        )
        assert "Hello" in kept
        assert "secret-1" not in kept
        page.reload()
        expect(page.get_by_text("This server asks for an API key.")).to_be_visible()


STORED_VALUES = """async () => {
    const settled = (request) => new Promise((done) => {
        request.onsuccess = ({ target }) => done(target.result);
    });
    const db = await settled(indexedDB.open("llaisys"));
    const all = await settled(db.transaction("values").objectStore("values").getAll());
    db.close();
    return JSON.stringify(all);
}"""


def test_a_wrong_key_is_reported_and_a_right_one_can_be_remembered(
    context: BrowserContext, tmp_path: Path
) -> None:
    with serving(tmp_path, str(GOLDENS / "qwen2-tied-bf16"), key="secret-1") as server:
        page = context.new_page()
        chat = Chat(page, server.url)
        page.goto(server.url)
        field = page.get_by_label("API key")
        remember = page.get_by_label("Remember the key in this browser")
        rejected = page.get_by_role("alert").filter(has_text="The server does not accept this key.")
        expect(field).to_be_visible()
        expect(rejected).to_have_count(0)
        expect(remember).not_to_be_checked()
        field.fill("wrong")
        field.press("Enter")
        expect(rejected).to_be_visible()
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_be_focused()
        remember.check()
        expect(page.get_by_text("Stored unencrypted in this browser")).to_be_visible()
        field.fill("secret-1")
        field.press("Enter")
        chat.mounted()
        expect(page.get_by_text("The server accepts this key.")).to_be_visible()
        expect(chat.message).to_be_focused()
        assert "secret-1" in page.evaluate(STORED_VALUES)
        # A reload needs no key; unchecking the box forgets it at once.
        chat.reload()
        page.keyboard.press("Control+,")
        page.get_by_role("tab", name="Page").click()
        expect(remember).to_be_checked()
        remember.uncheck()
        page.keyboard.press("Escape")
        chat.settle()
        assert "secret-1" not in page.evaluate(STORED_VALUES)
        page.reload()
        expect(page.get_by_text("This server asks for an API key.")).to_be_visible()


def test_a_rejected_key_is_reported_at_the_message(chat: Chat) -> None:
    chat.fail_with(401, "invalid_api_key", "Incorrect or missing API key")
    chat.send("Hello")
    expect(chat.completion.get_by_role("alert")).to_contain_text("The server does not accept the API key")
    expect(chat.page.get_by_label("API key")).to_be_visible()


def test_the_web_ui_waits_for_the_model_to_load(tiny: Server, context: BrowserContext) -> None:
    page = context.new_page()
    body = '{"error":{"message":"The model is still loading","code":"model_loading"}}'

    def loading(route: Route) -> None:
        route.fulfill(status=503, body=body)

    page.route("**/v1/models", loading)
    page.goto(tiny.url)
    expect(page.get_by_text("The model is still loading.")).to_be_visible()
    page.unroute("**/v1/models")
    expect(page.get_by_label("Model", exact=True)).to_be_visible()
