"""The scheduler in the status panel: lanes of requests, KV cells, and charts with their scales."""

from __future__ import annotations

import re
from contextlib import ExitStack

from playwright.sync_api import Locator, expect

from axe import violations
from chatpage import Chat
from serving import Server

ENDLESS = {
    "prompt": "x",
    "stream": True,
    "max_tokens": 8000,
    "ignore_eos": True,
    "request_id": "elsewhere",
}


def point_at_end(chat: Chat, target: Locator, shown: Locator, text: str) -> None:
    """Move the pointer to the right end of the target, again if it moves, until the text is shown."""

    def is_shown() -> bool:
        target.scroll_into_view_if_needed()
        box = target.bounding_box()
        if box is not None:
            chat.page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 3)
        return re.search(text, shown.text_content() or "") is not None

    chat.wait_for(is_shown)


def test_each_request_has_a_lane(steady_chat: Chat, steady: Server) -> None:
    """The lane of the shown chat is highlighted; one of another chat leads there."""
    panel = steady_chat.page.get_by_role("complementary", name="Server status")
    lanes = panel.get_by_role("region", name="Scheduler").get_by_role("listitem")
    title = steady_chat.page.get_by_role("heading", level=1)
    with ExitStack() as running:
        running.enter_context(steady.http.stream("POST", "/v1/completions", json=ENDLESS))
        for message in ("first lane", "second lane"):
            steady_chat.page.keyboard.press("Control+Shift+O")
            steady_chat.send(message)
            expect(steady_chat.text).to_be_visible()
        steady_chat.button("Server status").click()
        own = lanes.filter(has_text="second lane")
        other = lanes.filter(has_text="first lane")
        for lane in (own, other, lanes.filter(has_text="cmpl-elsewhere")):
            expect(lane).to_contain_text("Generating")
        expect(own).to_have_class(re.compile(r"\bown\b"))
        expect(other).not_to_have_class(re.compile(r"\bown\b"))
        expect(own.locator(".lane")).to_have_css("background-image", re.compile("gradient"))
        point_at_end(steady_chat, own.locator(".lane"), own, r"Generating.*: [\d.]+ s")
        assert violations(steady_chat.page) == []
        other.get_by_role("button").click()
        expect(title).to_have_text("first lane")
        expect(other).to_have_class(re.compile(r"\bown\b"))
        for _ in range(2):
            steady_chat.page.keyboard.press("Escape")
            steady_chat.done()
            steady_chat.sessions.filter(has_text="second lane").click()
            expect(title).to_have_text("second lane")
    assert steady_chat.complaints == []


def test_the_panel_shows_cached_cells_and_charts_with_scales(chat: Chat) -> None:
    chat.with_fields(max_tokens=32)
    chat.send("one")
    chat.done()
    chat.button("Server status").click()
    panel = chat.page.get_by_role("complementary", name="Server status")
    expect(panel.get_by_role("listitem").filter(has_text=re.compile("^[1-9][0-9,]* cached$"))).to_be_visible()
    chart = panel.get_by_role("figure").filter(has_text="Tokens generated per second")
    expect(chart.locator(".scale")).to_have_text(re.compile(r"^[\d,.]+ tok/s$"))
    expect(chart).to_contain_text("60 s ago")
    expect(chart.locator("polyline")).to_be_attached()
    point_at_end(chat, chart.locator("svg"), chart, r"tok/s, \d s ago")
    chat.page.mouse.move(0, 0)
    expect(chart.locator("b")).to_have_text(re.compile("tok/s$"))
    assert chat.complaints == []
