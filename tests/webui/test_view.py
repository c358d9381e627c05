"""What of a conversation is in view."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from chatpage import AT_END, COMPLETIONS, SCROLL_TOP, Chat

PARAGRAPHS = [f"paragraph {i} of a long completion with some words in it\n\n" for i in range(80)]


def conversation(page: Page) -> Locator:
    return page.get_by_role("region", name="Conversation")


def test_the_view_follows_the_first_completion_of_a_new_chat(fed: Chat) -> None:
    fed.send("q")
    fed.feed(*PARAGRAPHS)
    expect(fed.text.locator(".block").last).to_be_in_viewport()
    expect(fed.button("To the end")).to_have_count(0)
    fed.end()
    expect(fed.completion.locator("footer")).to_be_in_viewport()


@pytest.mark.parametrize("wheel_px", [400, 20])
def test_a_view_that_was_scrolled_up_stays_and_offers_the_end(fed: Chat, wheel_px: int) -> None:
    """Also by less than what counts as the end."""
    fed.send("q")
    fed.feed("".join(PARAGRAPHS[:30]))
    region = conversation(fed.page)
    fed.wait_for(lambda: region.evaluate(AT_END))
    top_px = fed.scroll_up(region, wheel_px)
    fed.feed(*PARAGRAPHS[30:40])
    assert region.evaluate(SCROLL_TOP) == top_px
    fed.button("To the end").click()
    expect(fed.text.locator(".block").last).to_be_in_viewport()
    expect(fed.button("To the end")).to_have_count(0)
    fed.feed(*PARAGRAPHS[40:])
    expect(fed.text.locator(".block").last).to_be_in_viewport()
    fed.end()


@pytest.mark.parametrize("n_lines", [30, 400])
def test_after_a_long_message_the_view_is_at_its_end(chat: Chat, n_lines: int) -> None:
    """Both for the first message of a chat and for a later one, and when the request fails later."""
    long = "\n".join(f"line {i}" for i in range(n_lines))
    held: list[Route] = []
    chat.page.route(COMPLETIONS, lambda route: held.append(route))
    for n in (1, 2):
        chat.send(long)
        expect(chat.completion.get_by_text("Waiting for the first word")).to_be_in_viewport(ratio=1)
        chat.wait_for(lambda n=n: len(held) == n)
        held[-1].abort()
        expect(chat.completion.get_by_role("alert")).to_be_in_viewport(ratio=1)
        expect(chat.button("To the end")).to_have_count(0)
        conversation(chat.page).evaluate("(element) => element.scrollTo(0, 0)")
        expect(chat.button("To the end")).to_be_visible()
