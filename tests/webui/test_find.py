"""Find in chat: hits in messages that are not mounted, too, in order and highlighted."""

from __future__ import annotations

from playwright.sync_api import expect

from chatpage import Chat

FILLER = "\n\n".join(f"Line {i} of something else." for i in range(80))
HIGHLIGHTED = "(name) => [...(CSS.highlights.get(name) ?? [])].map((range) => range.toString())"


def test_find_moves_through_hits_outside_of_the_view(chat: Chat) -> None:
    for text in (f"The Tides rise.\n\n{FILLER}\n\nMore ti**des**", FILLER, "No such word."):
        chat.complete_with(text)
        chat.send("about the moon")
        chat.done()
    expect(chat.text).to_have_text("No such word.")
    chat.page.keyboard.press("Control+f")
    field = chat.page.get_by_role("searchbox", name="Find in chat")
    expect(field).to_be_focused()
    status = chat.page.get_by_role("search").get_by_role("status")
    field.fill("tides r")
    expect(status).to_have_text("1 of 1")
    expect(chat.page.get_by_text("The Tides rise.")).to_be_in_viewport()
    chat.wait_for(lambda: chat.page.evaluate(HIGHLIGHTED, "find-current") == ["Tides r"])
    field.fill("tides")
    expect(status).to_have_text("1 of 2")
    field.press("Enter")
    expect(status).to_have_text("2 of 2")
    expect(chat.page.get_by_text("More tides")).to_be_in_viewport()
    # Every user message has the word; Enter goes on and wraps around, Shift+Enter goes back.
    field.fill("moon")
    for key, shown in (("Enter", 2), ("Enter", 3), ("Enter", 1), ("Shift+Enter", 3)):
        expect(status).not_to_have_text("Nothing found.")
        field.press(key)
        expect(status).to_have_text(f"{shown} of 3")
    expect(chat.user_texts.last).to_be_in_viewport()
    chat.wait_for(lambda: "moon" in chat.page.evaluate(HIGHLIGHTED, "find"))
    field.fill("nowhere")
    expect(status).to_have_text("Nothing found.")
    expect(chat.button("Next hit")).to_be_disabled()
    chat.page.keyboard.press("Escape")
    expect(field).to_have_count(0)
    expect(chat.message).to_be_focused()
    assert chat.page.evaluate(HIGHLIGHTED, "find") == []
    assert chat.complaints == []


def test_find_is_in_the_menu_and_ends_with_the_chat(chat: Chat) -> None:
    chat.complete_with("some **bo**ld text and ` code `")
    chat.send("one")
    chat.done()
    chat.menu("one", "Find in chat")
    field = chat.page.get_by_role("searchbox", name="Find in chat")
    field.fill("bold")
    expect(chat.page.get_by_role("search").get_by_role("status")).to_have_text("1 of 1")
    chat.wait_for(lambda: chat.page.evaluate(HIGHLIGHTED, "find") == ["bold"])
    chat.page.keyboard.press("Control+Shift+O")
    expect(field).to_have_count(0)
