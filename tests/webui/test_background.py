"""Background responses: an answer goes on without its page, and every page reads on in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, expect

from axe import violations
from chatpage import COMPLETIONS, RESPONSES, Chat
from serving import NO_SPECULATION, Server, serving

OPTION = "Answers go on when this page is closed or reloaded"
# A page cannot keep up with the tiny model on a busy machine, so these tests have a real one.
MODEL = "smollm2"
LONG = ("--num-kv-cells", "16384", "--max-num-seqs", "2", *NO_SPECULATION)
ENDLESS = {"ignore_eos": True, "temperature": 0}
# Breaks the connections of background responses: `window.cut()`.
CUT = """
(() => {
  const real = window.fetch;
  window.fetch = async (url, options) => {
    const answer = await real(url, options);
    if (!String(url).includes("/v1/responses")) return answer;
    const reader = answer.body.getReader();
    const body = new ReadableStream({
      start(control) {
        window.cut = () => control.error(new TypeError("network error"));
      },
      async pull(control) {
        const { done, value } = await reader.read();
        if (done) control.close();
        else control.enqueue(value);
      },
    });
    return new Response(body, answer);
  };
})();
"""
MESSAGES = """
() => new Promise((done) => {
    indexedDB.open("llaisys").onsuccess = ({ target }) => {
        const db = target.result;
        db.transaction("messages").objectStore("messages").getAll().onsuccess = (event) => {
            db.close();
            done(event.target.result);
        };
    };
})
"""
# Puts a value of the page into the store of the browser.
PUT_VALUE = """
([key, value]) => new Promise((done) => {
    indexedDB.open("llaisys").onsuccess = ({ target }) => {
        const db = target.result;
        const writing = db.transaction("values", "readwrite");
        writing.objectStore("values").put(value, key);
        writing.oncomplete = () => { db.close(); done(); };
    };
})
"""


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model with a response store; two requests run."""
    folder = tmp_path_factory.mktemp("storing")
    flags = ("--response-store", str(folder / "responses.db"), *LONG, "--strict-fields")
    with serving(folder, MODEL, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model with a response store, a chat store and two keys."""
    folder = tmp_path_factory.mktemp("shared")
    stores = ("--response-store", str(folder / "responses.db"), "--chat-store", str(folder / "chats.db"))
    with serving(folder, MODEL, *stores, *LONG, key="ours,theirs") as server:
        yield server


def open_with(key: str, context: BrowserContext, server: Server) -> Chat:
    """Open the web UI of a server that asks for a key, which the browser remembers."""
    chat = Chat(context.new_page(), server.url)
    chat.page.goto(server.url)
    chat.page.get_by_label("API key").fill(key)
    chat.page.get_by_label("Remember the key").check()
    chat.button("Unlock").click()
    chat.mounted()
    return chat


def option(chat: Chat) -> Locator:
    """Open the settings of the page; return the option."""
    chat.page.keyboard.press("Control+,")
    dialog = chat.page.get_by_role("dialog", name="Settings")
    dialog.get_by_role("tab", name="Page").click()
    expect(dialog.get_by_label("Theme")).to_be_visible()
    return dialog.get_by_label(OPTION)


def turn_on(chat: Chat) -> None:
    option(chat).check()
    chat.page.keyboard.press("Escape")


@pytest.fixture
def chat(storing: Server, context: BrowserContext) -> Iterator[Chat]:
    """Open the web UI with endless background responses. No request may be left running."""
    made = Chat.open(context, storing.url)
    turn_on(made)
    made.with_fields(RESPONSES, **ENDLESS)
    yield made
    storing.wait_idle()


def messages(chat: Chat) -> list[dict[str, Any]]:
    """Return the messages in the store of the browser, also of other chats of the key, the newest last."""
    found: list[dict[str, Any]] = chat.page.evaluate(MESSAGES)
    return sorted(found, key=lambda message: (message["createdMs"], message["role"] != "user"))


def response_id(chat: Chat) -> str:
    """Return the id of the response that the last completion is read from."""
    chat.wait_for(lambda: bool(messages(chat)[-1].get("run")))
    return str(messages(chat)[-1]["run"]["id"])


def is_whole(server: Server, completion: dict[str, Any], message: str = "Hello") -> bool:
    """Return whether a greedy completion has the text that the server generates without a break."""
    n = completion["usage"]["completionTokens"]
    body = {"messages": [{"role": "user", "content": message}], **ENDLESS, "max_tokens": n}
    response = server.http.post("/v1/chat/completions", json=body)
    text: str = response.json()["choices"][0]["message"]["content"]
    content = completion["content"]
    return len(content) > 0 and text.startswith(content) and len(text) - len(content) < 100


def begin(chat: Chat, message: str = "Hello") -> None:
    """Send a message and wait for the first text."""
    chat.send(message)
    expect(chat.text).not_to_be_empty()


def grows(chat: Chat) -> None:
    """Wait until the text of the last completion is longer than it is."""
    n = len(chat.text.inner_text())
    chat.wait_for(lambda: len(chat.text.inner_text()) > n)


def stop(chat: Chat, server: Server) -> None:
    """Stop the completion; its request ends at the server."""
    chat.button("Stop").click()
    chat.done()
    expect(chat.completion).to_contain_text("stopped by you")
    server.until("vllm:num_requests_running", 0)


def test_it_is_off_unless_it_is_turned_on(storing: Server, context: BrowserContext) -> None:
    chat = Chat.open(context, storing.url)
    expect(option(chat)).not_to_be_checked()
    assert violations(chat.page) == []
    chat.page.keyboard.press("Escape")
    chat.with_fields(**ENDLESS)
    with chat.page.expect_request(COMPLETIONS):
        begin(chat)
    stop(chat, storing)
    assert messages(chat)[-1].get("run") is None
    option(chat).check()
    chat.page.keyboard.press("Escape")
    chat.reload()
    expect(option(chat)).to_be_checked()


def test_a_server_without_a_response_store_does_not_offer_it(short: Server, context: BrowserContext) -> None:
    """Even if it was turned on for another server of the same address, answers are streams."""
    chat = Chat.open(context, short.url)
    expect(option(chat)).to_have_count(0)
    chat.page.keyboard.press("Escape")
    chat.page.evaluate(PUT_VALUE, ["settings", {"background": True}])
    chat.reload()
    chat.with_fields(max_tokens=4)
    with chat.page.expect_request(COMPLETIONS):
        chat.send("Hello")
    chat.done()
    expect(chat.text).not_to_be_empty()


def test_a_completion_goes_on_after_a_reload(chat: Chat, storing: Server) -> None:
    """Nothing is lost or repeated, however often the page is reloaded."""
    begin(chat)
    id = response_id(chat)
    for _ in range(2):
        chat.reload()
        expect(chat.button("Stop")).to_be_visible()
        grows(chat)
    assert storing.metric("vllm:num_requests_running") == 1
    stop(chat, storing)
    expect(chat.completion.locator(".usage")).to_contain_text("prompt tokens")
    expect(chat.completion.locator(".usage")).to_contain_text("tok/s")
    chat.settle()
    kept = messages(chat)[-1]
    assert is_whole(storing, kept)
    assert (kept["end"], kept.get("run")) == ("stopped", None)
    assert storing.http.get(f"/v1/responses/{id}").json()["status"] == "cancelled"
    assert chat.complaints == []


def test_a_reload_before_the_first_token(chat: Chat, storing: Server) -> None:
    """Two other requests fill the batch until the page was reloaded. A message that waits is sent then."""
    chat.with_fields(RESPONSES, **ENDLESS, max_output_tokens=4)
    endless = {"prompt": "x", "stream": True, "max_tokens": 8000, "ignore_eos": True}
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(storing.http.stream("POST", "/v1/completions", json=endless))
        chat.send("Hello")
        storing.until("vllm:num_requests_waiting", 1)
        chat.send("More")
        expect(chat.page.get_by_text("Sent after the answer: 1")).to_be_visible()
        chat.reload()
        expect(chat.completion).to_contain_text("Waiting for the first word")
    expect(chat.user_texts).to_have_text(["Hello", "More"])
    chat.done()
    expect(chat.completions.locator(".prose")).to_have_count(2)
    expect(chat.completion.locator(".usage")).to_contain_text("4 tokens")


def test_a_completion_ends_while_no_page_is_open(
    chat: Chat, storing: Server, context: BrowserContext
) -> None:
    chat.with_fields(RESPONSES, **ENDLESS, max_output_tokens=400)
    begin(chat)
    id = response_id(chat)
    chat.settle()
    chat.page.close()
    storing.until("vllm:num_requests_running", 0)
    again = Chat.open(context, storing.url)
    again.sessions.first.click()
    expect(again.completion).to_contain_text("cut: length limit")
    expect(again.completion.locator(".usage")).to_contain_text("400 tokens")
    again.settle()
    kept = messages(again)[-1]
    (item,) = storing.http.get(f"/v1/responses/{id}").json()["output"]
    assert kept["content"] == item["content"][0]["text"]
    assert 0 < kept["timing"]["firstTokenMs"] < kept["timing"]["totalMs"]
    again.reload()
    expect(again.completion).to_contain_text("cut: length limit")
    assert again.complaints == []


def test_a_second_tab_shows_the_same_completion(chat: Chat, storing: Server, context: BrowserContext) -> None:
    """Stop in one tab ends both. The chat that is not shown is marked as being answered."""
    begin(chat)
    chat.settle()
    second = Chat.open(context, storing.url)
    expect(second.page.get_by_role("img", name="Answering")).to_have_count(1)
    second.sessions.first.click()
    grows(second)
    grows(chat)
    stop(second, storing)
    chat.done()
    expect(chat.completion).to_contain_text("stopped by you")
    second.settle()
    assert second.text.inner_text() == chat.text.inner_text()


def test_a_browser_with_the_same_key_goes_on_reading(
    shared: Server, context: BrowserContext, browser: Browser
) -> None:
    """The chat store brings it the chat; a browser with another key sees neither."""
    first = open_with("ours", context, shared)
    turn_on(first)
    first.with_fields(RESPONSES, **ENDLESS)
    begin(first)
    other = browser.new_context()
    second = open_with("ours", other, shared)
    second.sessions.first.click()
    expect(second.button("Stop")).to_be_visible()
    grows(second)
    first.page.close()
    grows(second)
    stop(second, shared)
    second.settle()
    assert is_whole(shared, messages(second)[-1])
    other.close()
    stranger = browser.new_context()
    third = open_with("theirs", stranger, shared)
    expect(third.page.get_by_text("No chats yet.")).to_be_visible()
    stranger.close()


def test_a_response_of_another_key_is_not_shown(shared: Server, context: BrowserContext) -> None:
    """After the key was changed, the text so far stays, and one line says that the rest is lost."""
    chat = open_with("ours", context, shared)
    turn_on(chat)
    chat.with_fields(RESPONSES, **ENDLESS)
    begin(chat, "of one key")
    id = response_id(chat)
    chat.settle()
    chat.page.evaluate(PUT_VALUE, ["api_key", "theirs"])
    chat.reload()
    expect(chat.completion.get_by_role("alert")).to_contain_text("The server no longer has this answer")
    expect(chat.text).not_to_be_empty()
    assert shared.http.post(f"/v1/responses/{id}/cancel").is_success
    shared.wait_idle()


def test_a_lost_response_is_continued(chat: Chat, storing: Server) -> None:
    """The response is deleted while the page is away."""
    begin(chat)
    id = response_id(chat)
    chat.settle()
    chat.page.goto("about:blank")
    assert storing.http.delete(f"/v1/responses/{id}").is_success
    chat.page.goto(storing.url)
    chat.mounted()
    chat.sessions.first.click()
    alert = chat.completion.get_by_role("alert")
    expect(alert).to_contain_text("The server no longer has this answer")
    assert violations(chat.page) == []
    chat.settle()
    before = messages(chat)[-1]["content"]
    assert before
    chat.with_fields(RESPONSES, **ENDLESS, max_output_tokens=8)
    with chat.page.expect_request(RESPONSES) as request:
        chat.completion.get_by_role("button", name="Continue").click()
    assert request.value.post_data_json["input"][-1]["content"] == before
    chat.done()
    expect(alert).to_have_count(0)
    chat.settle()
    after = messages(chat)[-1]
    assert after["content"].startswith(before)
    assert len(after["content"]) > len(before)
    assert after["end"] == "length"


def test_a_broken_connection_is_made_again(chat: Chat, storing: Server) -> None:
    chat.page.add_init_script(CUT)
    chat.reload()
    begin(chat)
    for _ in range(2):
        chat.page.evaluate("cut()")
        grows(chat)
    expect(chat.page.get_by_role("alert")).to_have_count(0)
    stop(chat, storing)
    chat.settle()
    assert is_whole(storing, messages(chat)[-1])


def test_a_server_that_is_started_again(context: BrowserContext, tmp_path: Path) -> None:
    """It cannot go on with the answer: one line says so, and the text so far can be continued."""
    store = ("--response-store", str(tmp_path / "responses.db"), *LONG)
    with serving(tmp_path, MODEL, *store) as server:
        chat = Chat.open(context, server.url)
        turn_on(chat)
        chat.with_fields(RESPONSES, **ENDLESS)
        begin(chat)
        port = server.url.rsplit(":", 1)[1]
        server.process.kill()
        server.process.wait()
        expect(chat.page.get_by_role("alert")).to_contain_text("cannot be reached")
        kept = chat.text.inner_text()
        assert kept
    with serving(tmp_path, MODEL, *store, "--port", port) as server:
        alert = chat.completion.get_by_role("alert")
        expect(alert).to_contain_text("The server stopped before the response was complete.")
        assert chat.text.inner_text() == kept
        chat.with_fields(RESPONSES, **ENDLESS, max_output_tokens=4)
        chat.completion.get_by_role("button", name="Continue").click()
        chat.done()
        expect(alert).to_have_count(0)
        expect(chat.completion).to_contain_text("cut: length limit")


def test_own_settings_apply(chat: Chat) -> None:
    """The server refuses fields that it does not know (--strict-fields)."""
    params = {
        "max_tokens": 200,
        "typical_p": 0.95,
        "stop_token_ids": [0],
        "logit_bias": {"7": -100},
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["yes", "no"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    settings = {"model": "", "system": "Be brief.", "params": params, "schema": json.dumps(schema)}
    chat.settle()
    chat.page.evaluate(PUT_VALUE, ["settings", {"background": True, "chat": settings}])
    chat.reload()
    chat.page.unroute(RESPONSES)
    with chat.page.expect_response(RESPONSES) as response:
        chat.send("Hello")
    chat.done()
    assert response.value.status == httpx.codes.OK
    expect(chat.page.get_by_role("alert")).to_have_count(0)
    text = messages(chat)[-1]["content"]
    made, end = json.JSONDecoder().raw_decode(text)
    assert made["a"] in ("yes", "no")
    assert text[end:].startswith("<|")  # the special token that ends the completion


def test_the_token_view_shows_its_probabilities(chat: Chat) -> None:
    """A version that continues from a token is a background response, too."""
    chat.with_fields(RESPONSES, **ENDLESS, max_output_tokens=8)
    chat.send("Hello")
    chat.done()
    chat.completion.get_by_role("button", name="Token view").click()
    chat.completion.get_by_role("button", name="Regenerate").click()
    chat.done()
    tokens = chat.completion.get_by_role("listbox").get_by_role("option")
    expect(tokens).not_to_have_count(0)
    expect(chat.completion.locator(".tokens .unknown")).to_have_count(0)
    tokens.nth(1).click()
    card = chat.page.get_by_role("dialog")
    expect(card.get_by_role("button")).to_have_count(5)
    with chat.page.expect_request(RESPONSES) as request:
        card.get_by_role("button", disabled=False).first.click()
    assert request.value.post_data_json["continue_final_message"] is True
    chat.done()
    expect(chat.completion.locator(".tokens .unknown")).to_have_count(0)


def test_reasoning_goes_on_after_a_reload(context: BrowserContext, tmp_path: Path) -> None:
    """With this parser, everything before the end of the reasoning is reasoning."""
    flags = ("--response-store", str(tmp_path / "responses.db"), *LONG, "--reasoning-parser", "deepseek_r1")
    with serving(tmp_path, MODEL, *flags) as server:
        chat = Chat.open(context, server.url)
        turn_on(chat)
        chat.with_fields(RESPONSES, **ENDLESS)
        chat.send("Hello")
        reasoning = chat.completion.locator("details .body")
        for is_reloaded in (False, True, True):
            if is_reloaded:
                chat.reload()
            chat.completion.get_by_text("Thinking").click()
            expect(reasoning).not_to_be_empty()
            n_characters = len(reasoning.inner_text())
            chat.wait_for(lambda n=n_characters: len(reasoning.inner_text()) > n)
        stop(chat, server)
        chat.settle()
        kept = messages(chat)[-1]
        assert kept["content"] == ""
        n_tokens = kept["usage"]["completionTokens"]
        body = {"messages": [{"role": "user", "content": "Hello"}], **ENDLESS, "max_tokens": n_tokens}
        whole = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert whole["reasoning_content"].startswith(kept["reasoning"])
        assert kept["reasoning"]
        assert chat.complaints == []


def test_a_tool_call_is_shown_after_a_reload(context: BrowserContext, tmp_path: Path) -> None:
    """The page is reloaded while the model writes the call, whose result is then sent in the background."""
    text = {"text": {"const": "again and " * 300}}
    schema = {"type": "object", "properties": text, "required": ["text"], "additionalProperties": False}
    note = {"type": "function", "name": "note", "parameters": schema}
    flags = ("--response-store", str(tmp_path / "responses.db"), *LONG, "--tool-call-parser", "hermes")
    with serving(tmp_path, MODEL, *flags) as server:
        chat = Chat.open(context, server.url)
        turn_on(chat)
        one_call = {"tools": [note], "tool_choice": "required", "parallel_tool_calls": False}
        chat.with_fields(RESPONSES, temperature=0, **one_call)
        chat.send("Hello")
        path = f"/v1/responses/{response_id(chat)}"
        chat.wait_for(lambda: server.http.get(path).is_success)  # the page chooses the id before it sends it
        chat.reload()
        assert server.http.get(path).json()["status"] in ("queued", "in_progress")
        expect(chat.completion.get_by_role("region", name="Tool call note")).to_be_visible()
        chat.done()
        chat.completion.get_by_label("Result of note").fill("Written")
        chat.with_fields(RESPONSES, temperature=0, max_output_tokens=4)
        chat.button("Send results").click()
        expect(chat.page.get_by_role("article", name="Tool").locator(".bubble")).to_have_text("Written")
        chat.done()
        expect(chat.text).not_to_be_empty()
        assert chat.complaints == []
