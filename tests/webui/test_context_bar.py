"""The bar above the composer: how full the context is, what is cached, and a warning before it is full."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import BrowserContext, expect

from axe import violations
from chatpage import Chat
from serving import Server


@pytest.fixture
def small(short: Server, context: BrowserContext) -> Chat:
    """Open the web UI on the model with 512 tokens of context; completions have 8 tokens."""
    chat = Chat.open(context, short.url)
    chat.with_fields(max_tokens=8, ignore_eos=True)
    return chat


def tokens(server: Server, *messages: str) -> int:
    """Return the tokens of a chat of these messages, of the user and the model in turn."""
    roles = ("user", "assistant")
    body = {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]}
    return int(server.http.post("/tokenize", json=body).json()["count"])


def test_the_bar_counts_what_is_written(small: Chat, short: Server) -> None:
    chat = small
    expect(chat.meter).to_have_count(0)
    draft = "How many tokens are in this message?"
    chat.message.fill(draft)
    expect(chat.meter).to_have_attribute("aria-valuemax", "512")
    wanted = tokens(short, draft)
    expect(chat.meter).to_have_attribute("aria-valuetext", f"{wanted} of 512 tokens: 0 cached, {wanted} new")
    assert violations(chat.page) == []
    chat.message.press("Enter")
    chat.done()
    expect(chat.meter).to_have_attribute("aria-valuetext", re.compile(rf": {wanted + 8} cached, \d+ new"))


def test_an_edit_says_what_is_computed_again(small: Chat, short: Server) -> None:
    chat = small
    for message in ("the first message of this chat", "two"):
        chat.send(message)
        chat.done()
    chat.user_messages.last.get_by_role("button", name="Edit message").click()
    edit = chat.page.get_by_role("textbox", name="Edit message")
    for text in ("two", "three four five"):
        edit.fill(text)
        body = {"prompt": text, "add_special_tokens": False}
        again = short.http.post("/tokenize", json=body).json()["count"]
        expected = re.compile(rf"^Editing: about \d+ tokens stay cached, {again} are computed again")
        expect(chat.meter).to_have_attribute("aria-valuetext", expected)
    chat.page.keyboard.press("Escape")
    expect(chat.meter).to_have_attribute("aria-valuetext", re.compile(r"^\d+ of 512 tokens: \d+ cached"))


def test_a_warning_comes_before_the_context_is_full(small: Chat, short: Server) -> None:
    chat = small
    for message in ("word " * 30, "two", "three"):
        chat.send(message)
        chat.done()
    warning = chat.page.get_by_role("status").filter(has_text="context is nearly full")
    expect(warning).to_have_count(0)
    usage = chat.completion.locator(".usage").text_content() or ""
    found = re.search(r"^\s*(\d+) tokens.*?(\d+) prompt tokens", usage, re.DOTALL)
    assert found is not None, usage
    computed = int(found[1]) + int(found[2])
    expect(chat.meter).to_have_attribute("aria-valuetext", re.compile(f" {computed} cached"))
    used = int(chat.meter.get_attribute("aria-valuenow") or 0)
    each = tokens(short, "x " * 100) - tokens(short, "x " * 50)
    n = 50 * (512 - 30 - used) // each
    chat.message.fill("x " * n)
    expect(warning).to_contain_text("tokens are left for the answer")
    assert violations(chat.page) == []
    chat.message.fill("x " * (n + 100))
    over = chat.page.get_by_role("status").filter(has_text="the server will refuse it")
    expect(over).to_be_visible()
    chat.message.fill("x " * n)
    chat.button("Leave out the oldest turns").click()
    expect(warning).to_have_count(0)
    expect(chat.page.get_by_text("Not sent to the model above this line")).to_be_visible()
    assert chat.complaints == []
