"""One message to several models or settings side by side, and the answer that is kept."""

from __future__ import annotations

import json
from typing import Any

import httpx
from playwright.sync_api import Locator, Route, expect

from axe import violations
from chatpage import COMPLETIONS, Chat
from serving import Server


def columns(chat: Chat) -> Locator:
    return (
        chat.page.get_by_role("dialog")
        .get_by_role("region", name="Column", exact=False)
        .filter(has=chat.page.get_by_label("Preset"))
    )


def ask(chat: Chat, text: str) -> None:
    field = chat.page.get_by_role("textbox", name="One message for every column")
    field.fill(text)
    field.press("Enter")


def hold(chat: Chat) -> list[Route]:
    """Hold every request for a completion until the test goes on with it."""
    held: list[Route] = []
    chat.page.route(COMPLETIONS, lambda route: held.append(route))
    return held


def go_on(held: list[Route], **fields: Any) -> None:
    for route in held:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, **fields}))


def test_answers_stream_side_by_side_and_one_is_kept(chat: Chat, tiny: Server) -> None:
    chat.complete_with("yes")
    chat.send("first")
    chat.done()
    chat.page.unroute(COMPLETIONS)
    held = hold(chat)
    chat.page.keyboard.press("Control+Shift+M")
    expect(columns(chat)).to_have_count(2)
    expect(columns(chat).nth(0).locator("select").first).to_have_value("tiny")
    expect(columns(chat).nth(1).locator("select").first).to_have_value("other")
    chat.button("Add a column").click()
    chat.button("Add a column").click()
    expect(chat.button("Add a column")).to_be_disabled()
    columns(chat).nth(3).get_by_role("button", name="Remove column").click()
    columns(chat).nth(1).get_by_label("Preset").select_option(label="Precise")
    columns(chat).nth(2).get_by_label("Temperature").fill("0.5")
    ask(chat, "second")
    chat.wait_for(lambda: len(held) == 3)
    bodies = [route.request.post_data_json for route in held]
    assert [(body["model"], body.get("temperature")) for body in bodies] == [
        ("tiny", None),
        ("other", 0),
        ("tiny", 0.5),
    ]
    for body in bodies:
        assert [message["content"] for message in body["messages"]] == ["first", "yes", "second"]
    limits = {"max_tokens": 40, "ignore_eos": True}
    go_on(held, **limits)
    expect(columns(chat).locator(".prose")).to_have_count(3)
    tiny.until("vllm:num_requests_running", 0)
    expect(chat.button("Keep this one")).to_have_count(3)
    assert violations(chat.page) == []
    columns(chat).nth(1).get_by_role("button", name="Keep this one").click()
    expect(chat.page.get_by_role("dialog")).to_have_count(0)
    expect(chat.user_texts).to_have_text(["first", "second"])
    body = {**bodies[1], **limits, "stream": False}
    body.pop("stream_options")
    response = tiny.http.post("/v1/chat/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    expected = response.json()["choices"][0]["message"]["content"]
    expect(chat.completion.locator(".usage")).to_contain_text("other")
    # The chat goes on with the settings of the kept answer, also after a reload.
    chat.page.unroute(COMPLETIONS)
    chat.reload()
    expect(chat.user_texts).to_have_text(["first", "second"])
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.complete_with("yes")
        chat.send("third")
    sent = request.value.post_data_json
    assert (sent["model"], sent["temperature"]) == ("other", 0)
    contents = [message["content"] for message in sent["messages"]]
    assert contents == ["first", "yes", "second", expected, "third"]
    assert chat.complaints == []


def test_a_comparison_begins_a_chat_and_survives_closing(chat: Chat) -> None:
    held = hold(chat)
    chat.button("Compare answers").click()
    ask(chat, "Why tides?")
    chat.wait_for(lambda: len(held) == 2)
    chunk = {"choices": [{"delta": {"content": "The moon."}, "finish_reason": "stop"}]}
    stream = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    held[0].fulfill(body=stream, headers={"content-type": "text/event-stream"})
    error = {"error": {"message": "all places are taken", "code": "server_overloaded"}}
    held[1].fulfill(status=429, body=json.dumps(error), headers={"content-type": "application/json"})
    expect(columns(chat).nth(1)).to_contain_text("all places are taken")
    expect(columns(chat).nth(1).get_by_role("button", name="Keep this one")).to_be_disabled()
    chat.page.keyboard.press("Escape")
    expect(chat.sessions).to_have_count(0)
    chat.page.keyboard.press("Control+Shift+M")
    columns(chat).nth(0).get_by_role("button", name="Keep this one").click()
    expect(chat.text).to_have_text("The moon.")
    expect(chat.sessions).to_have_text(["Why tides?"])


def test_stop_ends_every_request_of_a_comparison(steady_chat: Chat, steady: Server) -> None:
    steady_chat.page.keyboard.press("Control+Shift+M")
    ask(steady_chat, "Hello")
    steady.until("vllm:num_requests_running", 2)
    steady_chat.page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    steady.until("vllm:num_requests_running", 0)
    expect(columns(steady_chat).nth(0)).to_contain_text("stopped by you")
    expect(columns(steady_chat).nth(1)).to_contain_text("stopped by you")


def test_a_comparison_waits_for_the_answer_of_its_chat(fed: Chat) -> None:
    fed.send("first")
    fed.feed("one")
    fed.page.keyboard.press("Control+Shift+M")
    fed.page.get_by_role("textbox", name="One message for every column").fill("second")
    expect(fed.page.get_by_text("The chat is still being answered.")).to_be_visible()
    expect(fed.button("Ask all")).to_be_disabled()
    fed.page.evaluate("feed.end(); window.feed = null")
    expect(fed.button("Ask all")).to_be_enabled()
