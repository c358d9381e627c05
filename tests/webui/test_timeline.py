"""What the time of a completion was spent on, as a bar with a legend."""

from __future__ import annotations

import re
from contextlib import ExitStack

from playwright.sync_api import Locator, expect

from axe import violations
from chatpage import Chat
from serving import Server


def legend(chat: Chat) -> Locator:
    """Open the last completion's bar and return the lines of its legend."""
    chat.completion.locator(".time summary").click()
    return chat.completion.locator(".time").get_by_role("listitem")


def test_a_bar_says_what_a_completion_waited_for(steady_chat: Chat, steady: Server) -> None:
    """Other clients fill the batch of four, so two chats wait; the second one is behind the first one."""
    chat = steady_chat
    chat.with_fields(max_tokens=8)
    # Nobody reads these streams. Those of the tiny model would end by full buffers before the page is ready.
    long = {"prompt": "x", "stream": True, "max_tokens": 3000, "ignore_eos": True}
    with ExitStack() as running:
        for _ in range(4):
            running.enter_context(steady.http.stream("POST", "/v1/completions", json=long))
        for n, message in enumerate(("first chat", "second chat"), 1):
            chat.page.keyboard.press("Control+Shift+O")
            chat.send(message)
            chat.wait_for(lambda n=n: steady.metric("vllm:num_requests_waiting") == n)
    chat.done()
    queued = legend(chat).filter(has_text="Waiting in the queue")
    expect(queued).to_contain_text("“first chat”")
    expect(queued).to_contain_text(re.compile(r"\d s"))
    expect(chat.completion.locator(".time .bar i")).not_to_have_count(0)
    assert violations(chat.page) == []
    chat.reload()
    expect(legend(chat).filter(has_text="Waiting in the queue")).to_contain_text("“first chat”")
    assert chat.complaints == []


def test_a_stopped_completion_has_a_bar_too(steady_chat: Chat) -> None:
    steady_chat.send("one")
    expect(steady_chat.text).to_be_visible()
    steady_chat.page.keyboard.press("Escape")
    steady_chat.done()
    expect(legend(steady_chat).filter(has_text="Generating").first).to_be_visible()
