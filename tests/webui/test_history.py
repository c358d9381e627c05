"""Chats have addresses: Back and Forward move between them, links open them, and each keeps its place."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import BrowserContext, expect

from chatpage import AT_END, Chat
from serving import Server

WHEEL_PX = 1500
LONG = "\n\n".join(f"Paragraph {i}." for i in range(120))


def three(chat: Chat, completion: str = "yes") -> None:
    """Create the chats `one`, `two` and `three`, and show each in turn."""
    chat.complete_with(completion)
    for title in ("one", "two", "three"):
        chat.page.keyboard.press("Control+Shift+O")
        chat.send(title)
        expect(chat.sessions.first).to_have_text(title)
        chat.done()
    for title in ("one", "two", "three"):
        open_chat(chat, title)


def shows(chat: Chat, title: str) -> None:
    """Wait until the chat is shown; of a long one, its first message is not mounted."""
    expect(chat.page.get_by_role("heading", level=1)).to_have_text(title)


def open_chat(chat: Chat, title: str) -> None:
    chat.sessions.filter(has_text=title).click()
    shows(chat, title)


def test_back_and_forward_move_between_chats(chat: Chat) -> None:
    three(chat)
    for title in ("two", "one"):
        chat.page.go_back()
        shows(chat, title)
        expect(chat.page).to_have_title(title)
    for title in ("two", "three"):
        chat.page.go_forward()
        shows(chat, title)
    # A new chat has an address, too; the chat that begins there takes its place.
    chat.page.keyboard.press("Control+Shift+O")
    expect(chat.user_messages).to_have_count(0)
    chat.page.go_back()
    shows(chat, "three")
    chat.page.keyboard.press("Control+Shift+O")
    chat.send("four")
    shows(chat, "four")
    chat.done()
    chat.page.go_back()
    shows(chat, "three")


def test_back_passes_over_a_deleted_chat(chat: Chat) -> None:
    three(chat)
    chat.menu("three", "Delete")
    expect(chat.user_messages).to_have_count(0)
    chat.page.go_back()
    shows(chat, "two")
    chat.menu("one", "Delete")
    chat.page.go_back()
    expect(chat.page.get_by_text("There is no chat at this link")).to_be_visible()
    expect(chat.page).to_have_url(f"{chat.url}/#/")


def test_a_link_to_a_chat_is_copied_and_opens_it(chat: Chat, tiny: Server, context: BrowserContext) -> None:
    three(chat)
    chat.menu("one", "Copy link")
    expect(chat.page.get_by_text("Link copied.")).to_be_visible()
    link = chat.page.evaluate("navigator.clipboard.readText()")
    assert link.startswith(f"{tiny.url}/#/chat/")
    other = Chat.open(context, link)
    expect(other.user_texts).to_have_text(["one"])
    other.page.close()


def test_an_address_without_a_chat_shows_a_new_one(tiny: Server, context: BrowserContext) -> None:
    chat = Chat.open(context, f"{tiny.url}/#/chat/never-was")
    expect(chat.page.get_by_text("There is no chat at this link")).to_be_visible()
    expect(chat.page).to_have_url(f"{tiny.url}/#/")


def top_of_view(chat: Chat) -> Any:
    """Return the first paragraph in view and its position in pixels."""
    return chat.page.get_by_role("region", name="Conversation").evaluate(
        """(list) => {
            const top = list.getBoundingClientRect().top;
            const all = [...list.querySelectorAll(".prose p")];
            const first = all.find((p) => p.getBoundingClientRect().top >= top);
            return [first.textContent, first.getBoundingClientRect().top - top];
        }"""
    )


def test_a_chat_keeps_its_place(chat: Chat) -> None:
    three(chat, LONG)
    # Once the tokens are counted, the context bar takes some of the list's height, and its end moves.
    expect(chat.meter).to_be_visible()
    region = chat.page.get_by_role("region", name="Conversation")
    chat.wait_for(lambda: region.evaluate(AT_END))
    chat.scroll_up(region, WHEEL_PX)
    expect(chat.page.get_by_role("button", name="To the end")).to_be_visible()
    before = top_of_view(chat)
    for leave in ("back", "reload", "click"):
        if leave == "reload":
            chat.reload()
        elif leave == "click":
            open_chat(chat, "one")
            open_chat(chat, "three")
        else:
            chat.page.go_back()
            shows(chat, "two")
            # A chat that was left at its end is shown at its end.
            expect(chat.page.get_by_role("button", name="To the end")).to_have_count(0)
            chat.page.go_forward()
            shows(chat, "three")
        chat.wait_for(lambda: top_of_view(chat) == before)
