"""A conversation: streaming, stopping, editing, branches, forks, continuing; against real servers."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from playwright.sync_api import BrowserContext, Route, expect

from chatpage import COMPLETIONS, Chat
from serving import Server
from sse import chunks

GREEDY = {"temperature": 0}


def reference(server: Server, *contents: str, **fields: object) -> str:
    """Return the server's completion of this conversation without a stream."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    body = {"messages": messages, **GREEDY, **fields}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def stored(chat: Chat) -> list[str]:
    """Return the contents of all messages in the store of the browser, oldest first."""
    found: list[str] = chat.page.evaluate(
        """() => new Promise((done) => {
            indexedDB.open("llaisys").onsuccess = ({ target }) => {
                const db = target.result;
                db.transaction("messages").objectStore("messages").getAll().onsuccess = (event) => {
                    db.close();
                    // A user message and its completion may have the same millisecond.
                    const after = (a, b) => Number(a.parent === b.id) - Number(b.parent === a.id);
                    const all = event.target.result.sort((a, b) => a.createdMs - b.createdMs || after(a, b));
                    done(all.map(({ content }) => content));
                };
            };
        })"""
    )
    return found


def test_a_completion_streams_from_smollm2(smollm2: Server, context: BrowserContext) -> None:
    chat = Chat.open(context, smollm2.url)
    chat.with_fields(**GREEDY, max_tokens=24)
    chat.send("What is gravity?")
    chat.done()
    expected = reference(smollm2, "What is gravity?", max_tokens=24)
    expect(chat.text).to_have_text(" ".join(expected.split()))
    usage = chat.completion.locator(".usage")
    expect(usage).to_contain_text("prompt tokens")
    expect(usage).to_contain_text("24 tokens")
    expect(usage).to_contain_text("first after")
    expect(usage).to_contain_text("tok/s")
    expect(usage).to_contain_text("cut: length limit")
    expect(chat.page.get_by_role("heading", level=1)).to_have_text("What is gravity?")
    assert chat.complaints == []


def test_stop_ends_the_request_and_keeps_the_text(steady_chat: Chat, steady: Server) -> None:
    aborted = steady.metric("vllm:request_success_total", finished_reason="abort")
    steady_chat.send("Hello")
    expect(steady_chat.text).not_to_be_empty()
    steady.until("vllm:num_requests_running", 1)
    steady_chat.button("Stop").click()
    steady.until("vllm:num_requests_running", 0)
    steady.until("vllm:request_success_total", aborted + 1, finished_reason="abort")
    expect(steady_chat.completion).to_contain_text("stopped by you")
    expect(steady_chat.completion.locator(".usage")).to_contain_text("prompt tokens")
    _, kept = stored(steady_chat)
    assert steady_chat.complaints == []
    steady_chat.reload()
    expect(steady_chat.text).not_to_be_empty()
    expect(steady_chat.completion).to_contain_text("stopped by you")
    assert kept
    assert stored(steady_chat) == ["Hello", kept]


def test_two_chats_stream_at_once_without_mixing(chat: Chat, tiny: Server) -> None:
    """Each completion is the same, bit for bit, as the one that its message gets alone."""
    fields = {**GREEDY, "ignore_eos": True, "max_tokens": 400}
    held: list[Route] = []
    chat.page.route(COMPLETIONS, lambda route: held.append(route))
    chat.send("first question")
    expect(chat.page.get_by_role("img", name="Answering")).to_have_count(1)
    chat.button("New chat").first.click()
    expect(chat.user_messages).to_have_count(0)
    chat.send("second question")
    expect(chat.page.get_by_role("img", name="Answering")).to_have_count(2)
    chat.wait_for(lambda: len(held) == 2)
    for route in held:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, **fields}))
    expect(chat.text).not_to_be_empty()
    chat.done()
    expect(chat.user_texts).to_have_text("second question")
    tiny.until("vllm:num_requests_running", 0)
    expect(chat.page.get_by_role("img", name="New answer")).to_have_count(1)
    chat.sessions.filter(has_text="first question").click()
    expect(chat.user_texts).to_have_text("first question")
    expect(chat.page.get_by_role("img", name="New answer")).to_have_count(0)
    first = reference(tiny, "first question", **fields)
    second = reference(tiny, "second question", **fields)
    assert first != second
    texts = [text for text in stored(chat) if "question" not in text]
    assert texts == [first, second]


def test_a_request_has_the_whole_conversation(chat: Chat) -> None:
    chat.complete_with("Hi 天")
    chat.send("first")
    expect(chat.text).to_have_text("Hi 天")
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.send("second")
    contents = [message["content"] for message in request.value.post_data_json["messages"]]
    assert contents == ["first", "Hi 天", "second"]
    expect(chat.completion.locator(".usage")).to_contain_text("7 prompt tokens, 5 cached")


def test_editing_a_user_message_makes_a_branch(chat: Chat, tiny: Server) -> None:
    fields = {**GREEDY, "max_tokens": 12, "ignore_eos": True}
    chat.with_fields(**fields)
    for message in ("one", "two"):
        chat.send(message)
        chat.done()
    first = chat.user_messages.first
    first.hover()
    first.get_by_role("button", name="Edit message").click()
    box = chat.page.get_by_role("textbox", name="Edit message")
    expect(box).to_be_focused()
    expect(box).to_have_value("one")
    box.fill("three")
    box.press("Control+Enter")
    expect(chat.user_texts).to_have_text(["three"])
    chat.done()
    assert stored(chat)[-1] == reference(tiny, "three", **fields)
    # The arrows switch between the branches, each with the messages that follow.
    chat.user_messages.first.get_by_role("button", name="Previous version").click()
    expect(chat.user_texts).to_have_text(["one", "two"])
    expect(chat.completions).to_have_count(2)
    chat.reload()
    expect(chat.user_texts).to_have_text(["one", "two"])
    chat.user_messages.first.get_by_role("button", name="Next version").click()
    expect(chat.user_texts).to_have_text(["three"])


def test_after_an_edit_the_cached_tokens_are_shown(chat: Chat) -> None:
    """The number is the one in the server's response to this request."""
    chat.with_fields(**GREEDY, max_tokens=6, ignore_eos=True)
    for message in ("one", "two"):
        chat.send(message)
        chat.done()
    responses: list[bytes] = []

    def listen(route: Route) -> None:
        """Pass the server's whole response on to the web UI."""
        body = {**route.request.post_data_json, **GREEDY, "max_tokens": 6, "ignore_eos": True}
        response = route.fetch(post_data=json.dumps(body))
        responses.append(response.body())
        route.fulfill(response=response)

    chat.page.unroute(COMPLETIONS)
    chat.page.route(COMPLETIONS, listen)
    chat.message.press("ArrowUp")
    chat.page.get_by_role("textbox", name="Edit message").fill("two, differently")
    chat.page.keyboard.press("Control+Enter")
    expect(chat.user_texts).to_have_text(["one", "two, differently"])
    chat.done()
    *_, last = chunks(responses[-1])
    cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    shown = f"{last['usage']['prompt_tokens']} prompt tokens, {cached} cached"
    expect(chat.completion.locator(".usage")).to_contain_text(shown)


def test_regenerating_keeps_the_other_completion(chat: Chat) -> None:
    chat.complete_with("one")
    chat.send("q")
    expect(chat.text).to_have_text("one")
    chat.complete_with("two")
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.completion.get_by_role("button", name="Regenerate").click()
    assert [message["content"] for message in request.value.post_data_json["messages"]] == ["q"]
    expect(chat.text).to_have_text("two")
    expect(chat.completion.get_by_role("group", name="Versions")).to_have_text("2/2")
    chat.completion.get_by_role("button", name="Previous version").click()
    expect(chat.text).to_have_text("one")


def test_a_cut_completion_is_continued(chat: Chat, tiny: Server) -> None:
    """The rest is the model's completion of the text before the cut."""
    chat.with_fields(**GREEDY, max_tokens=8, ignore_eos=True)
    chat.send("Hello")
    chat.done()
    before = stored(chat)[-1]
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.completion.get_by_role("button", name="Continue").click()
    sent = request.value.post_data_json
    assert sent["continue_final_message"] is True
    assert sent["add_generation_prompt"] is False
    assert sent["messages"][-1] == {"role": "assistant", "content": before}
    chat.done()
    fields = {"max_tokens": 8, "ignore_eos": True, "continue_final_message": True}
    rest = reference(tiny, "Hello", before, add_generation_prompt=False, **fields)
    assert stored(chat) == ["Hello", before + rest]
    expect(chat.completions).to_have_count(1)
    expect(chat.completion.locator(".usage")).to_contain_text("16 tokens")


def test_reasoning_that_was_cut_is_continued(chat: Chat) -> None:
    """The model gets its reasoning, which it closes, or which the server separates."""
    chat.complete_with({"reasoning_content": "let me"}, finish="length")
    chat.send("q")
    chat.done()
    chat.complete_with(" see.</th", "ink>\n\nyes")
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.completion.get_by_role("button", name="Continue").click()
    sent = request.value.post_data_json
    assert sent["continue_final_message"] is True
    assert sent["messages"][-1] == {"role": "assistant", "content": "<think>\nlet me"}
    expect(chat.text).to_have_text("yes")
    chat.completion.get_by_text("Reasoning").click()
    expect(chat.completion.locator("details .prose")).to_have_text("let me see.")
    chat.complete_with({"reasoning_content": "hm"}, finish="length")
    chat.completion.get_by_role("button", name="Regenerate").click()
    chat.done()
    chat.complete_with({"reasoning_content": " so"}, "no")
    chat.completion.get_by_role("button", name="Continue").click()
    expect(chat.text).to_have_text("no")
    chat.completion.get_by_text("Reasoning").click()
    expect(chat.completion.locator("details .prose")).to_have_text("hm so")


def test_reasoning_that_was_stopped_can_be_continued(fed: Chat) -> None:
    fed.send("q")
    fed.page.wait_for_function("window.feed")
    fed.page.evaluate("feed.reasoning('hm')")
    expect(fed.completion.get_by_text("Thinking")).to_be_visible()
    fed.button("Stop").click()
    expect(fed.completion).to_contain_text("stopped by you")
    expect(fed.completion.get_by_role("button", name="Continue")).to_be_enabled()


def test_a_reload_keeps_the_partial_completion_and_offers_to_continue(
    steady_chat: Chat, steady: Server
) -> None:
    steady_chat.send("Hello")
    expect(steady_chat.text).to_have_text(re.compile(".{200}", re.DOTALL))
    steady_chat.reload()
    steady.until("vllm:num_requests_running", 0)
    expect(steady_chat.completion).to_contain_text("interrupted")
    _, kept = stored(steady_chat)
    assert kept
    steady_chat.page.unroute(COMPLETIONS)
    steady_chat.with_fields(ignore_eos=True, max_tokens=5)
    with steady_chat.page.expect_request(COMPLETIONS) as request:
        steady_chat.completion.get_by_role("button", name="Continue").click()
    assert request.value.post_data_json["messages"][-1] == {"role": "assistant", "content": kept}
    steady_chat.done()
    assert stored(steady_chat)[-1].startswith(kept)
    expect(steady_chat.completion).to_contain_text("cut: length limit")


def test_a_completion_is_edited(chat: Chat) -> None:
    chat.complete_with("theirs")
    chat.send("q")
    expect(chat.text).to_have_text("theirs")
    chat.completion.get_by_role("button", name="Edit answer").click()
    box = chat.page.get_by_role("textbox", name="Edit answer")
    box.fill("mine")
    chat.button("Save").click()
    expect(chat.text).to_have_text("mine")
    expect(chat.completion).to_contain_text("edited by you")
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.send("next")
    assert [message["content"] for message in request.value.post_data_json["messages"]] == [
        "q",
        "mine",
        "next",
    ]
    chat.completions.first.get_by_role("button", name="Previous version").click()
    expect(chat.text).to_have_text("theirs")


def test_a_conversation_is_forked_from_a_message(chat: Chat) -> None:
    chat.complete_with("yes")
    for message in ("one", "two"):
        chat.send(message)
        expect(chat.text).to_have_text("yes")
        chat.done()
    chat.completions.first.hover()
    chat.completions.first.get_by_role("button", name="Fork from here").click()
    expect(chat.user_texts).to_have_text(["one"])
    expect(chat.page.get_by_role("heading", level=1)).to_have_text("Fork: one")
    expect(chat.sessions).to_have_count(2)
    chat.send("three")
    expect(chat.user_texts).to_have_text(["one", "three"])
    chat.sessions.filter(has_not_text="Fork").click()
    expect(chat.user_texts).to_have_text(["one", "two"])


def test_a_fork_is_named_after_its_own_first_message(chat: Chat) -> None:
    chat.complete_with("yes")
    chat.send("one")
    chat.done()
    chat.user_messages.hover()
    chat.user_messages.get_by_role("button", name="Edit message").click()
    chat.page.get_by_role("textbox", name="Edit message").fill("two")
    chat.page.keyboard.press("Control+Enter")
    expect(chat.user_texts).to_have_text(["two"])
    chat.done()
    chat.user_messages.get_by_role("button", name="Previous version").click()
    expect(chat.user_texts).to_have_text(["one"])
    chat.completion.get_by_role("button", name="Fork from here").click()
    expect(chat.page.get_by_role("heading", level=1)).to_have_text("Fork: one")


def test_a_deleted_message_can_be_restored(chat: Chat) -> None:
    chat.complete_with("yes")
    for message in ("one", "two"):
        chat.send(message)
        chat.done()
    expect(chat.completions).to_have_count(2)
    chat.user_messages.last.hover()
    chat.user_messages.last.get_by_role("button", name="Delete message").click()
    expect(chat.user_texts).to_have_text(["one"])
    assert sorted(stored(chat)) == ["one", "yes"]
    chat.button("Undo").click()
    expect(chat.user_texts).to_have_text(["one", "two"])
    assert sorted(stored(chat)) == ["one", "two", "yes", "yes"]


def test_a_completion_is_copied(chat: Chat) -> None:
    chat.complete_with("**bold** 天")
    chat.send("q")
    chat.completion.get_by_role("button", name="Copy").click()
    expect(chat.completion.get_by_role("button", name="Copied")).to_be_visible()
    assert chat.page.evaluate("navigator.clipboard.readText()") == "**bold** 天"


@pytest.mark.parametrize("key", ["Shift+Enter", "Enter"])
def test_enter_sends_and_shift_enter_is_a_new_line(chat: Chat, key: str) -> None:
    chat.complete_with("yes")
    chat.message.fill("one")
    chat.message.press(key)
    if key == "Enter":
        expect(chat.user_texts).to_have_text(["one"])
    else:
        chat.message.press_sequentially("two")
        expect(chat.message).to_have_value("one\ntwo")
        expect(chat.user_messages).to_have_count(0)
