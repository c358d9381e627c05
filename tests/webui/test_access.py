"""Accessibility: axe finds no violation, the keyboard reaches everything, and a phone shows everything."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from axe import violations
from chatpage import Chat
from serving import Server

RICH = (
    "### A heading\n\nText with `code`, a [link](https://example.com) and $x^2$.\n\n"
    "```python\nprint(1)  # one\n```\n\n| a |\n|---|\n| 1 |\n\n- [x] done\n- [ ] open **task**\n\n"
    f"$$\n{' + '.join('abcdefghijklmnopqrstuvwxyz' * 2)}\n$$\n"
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_the_main_views(chat: Chat, scheme: str) -> None:
    chat.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce")
    views = {"welcome": violations(chat.page)}
    chat.complete_with({"reasoning_content": "hm"}, RICH)
    chat.send("A question")
    expect(chat.text.locator("math")).to_have_count(2)
    expect(chat.text.locator(".hljs-comment")).to_have_count(1)
    chat.completion.get_by_text("Reasoning").click()
    views["conversation"] = violations(chat.page)
    chat.completion.locator(".usage button").click()
    expect(chat.completion.get_by_text("Time to first token")).to_be_visible()
    views["usage"] = violations(chat.page)
    chat.page.keyboard.press("Escape")
    chat.page.keyboard.press("Control+F")
    chat.page.get_by_role("searchbox", name="Find in chat").fill("heading")
    expect(chat.page.get_by_role("search").get_by_role("status")).to_have_text("1 of 1")
    views["find"] = violations(chat.page)
    chat.page.keyboard.press("Escape")
    chat.fail_with(429, "server_overloaded", "all places are taken")
    chat.send("Another")
    expect(chat.page.get_by_role("alert")).to_be_visible()
    chat.completions.first.get_by_role("button", name="Regenerate").click()
    chat.button("Server status").click()
    expect(chat.page.get_by_role("complementary")).to_contain_text("KV cells")
    views["error, branches and status"] = violations(chat.page)
    chat.page.keyboard.press("Control+,")
    chat.page.get_by_text("More parameters").click()
    chat.page.get_by_text("Structured output and tools").click()
    views["settings"] = violations(chat.page)
    chat.page.get_by_role("tab", name="Answers").press("ArrowRight")
    expect(chat.page.get_by_role("tab", name="Page")).to_be_focused()
    expect(chat.page.get_by_label("Theme")).to_be_visible()
    views["settings of the page"] = violations(chat.page)
    chat.page.keyboard.press("Escape")
    chat.page.keyboard.press("Control+K")
    chat.page.get_by_role("searchbox").fill("question")
    expect(chat.page.get_by_role("dialog").get_by_role("listitem")).not_to_have_count(0)
    views["search"] = violations(chat.page)
    chat.page.keyboard.press("Escape")
    chat.page.keyboard.press("Control+/")
    views["help"] = violations(chat.page)
    chat.page.keyboard.press("Escape")
    chat.page.get_by_role("navigation").get_by_role("button", name="Actions for").first.click()
    expect(chat.page.get_by_role("menuitem", name="Rename")).to_be_focused()
    views["menu"] = violations(chat.page)
    assert {name: found for name, found in views.items() if found} == {}


def test_a_phone_shows_everything(browser: Browser, tiny: Server) -> None:
    context = browser.new_context(
        viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True, reduced_motion="reduce"
    )
    chat = Chat.open(context, tiny.url)
    chat.complete_with("x" * 300 + "\n\n" + RICH)
    chat.message.fill("y" * 300)
    chat.button("Send").tap()
    expect(chat.text).to_contain_text("x" * 300)
    expect(chat.text.locator("math")).to_have_count(2)
    assert chat.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    expect(chat.button("Send")).to_be_in_viewport(ratio=1)
    expect(chat.completion.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(chat.sessions).to_have_count(0)
    chat.button("Chat list").tap()
    expect(chat.sessions).to_have_count(1)
    assert violations(chat.page) == []
    chat.button("New chat").first.tap()
    expect(chat.sessions).to_have_count(0)
    expect(chat.user_messages).to_have_count(0)
    for name in ("Server status", "Settings"):
        chat.button(name).tap()
        assert chat.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert violations(chat.page) == []
        chat.button("Close").first.tap()
    context.close()


def test_everything_is_reachable_by_keyboard(chat: Chat) -> None:
    """A conversation, its edits, the list, the menu and the dialogs need no mouse."""
    keyboard = chat.page.keyboard
    chat.complete_with("yes")
    expect(chat.message).to_be_focused()
    keyboard.type("one")
    keyboard.press("Enter")
    expect(chat.text).to_have_text("yes")
    chat.done()
    # Edit the last message from an empty field.
    keyboard.press("ArrowUp")
    expect(chat.page.get_by_role("textbox", name="Edit message")).to_be_focused()
    keyboard.press("Escape")
    expect(chat.page.get_by_role("textbox", name="Edit message")).to_have_count(0)
    chat.message.focus()
    keyboard.press("ArrowUp")
    expect(chat.page.get_by_role("textbox", name="Edit message")).to_be_focused()
    keyboard.type(" more")
    keyboard.press("Control+Enter")
    expect(chat.user_texts).to_have_text(["one more"])
    # The buttons of a completion are in the tab order.
    chat.completion.get_by_role("button", name="Copy").focus()
    reached = []
    for _ in range(6):
        keyboard.press("Tab")
        reached.append(chat.page.evaluate("document.activeElement.getAttribute('aria-label')"))
    others = ["Answer with other settings", "Token view", "Edit answer", "Fork from here", "Delete message"]
    assert reached == ["Regenerate", *others]
    # Arrows move through the menu of a chat, and Enter chooses.
    chat.sessions.first.focus()
    keyboard.press("Tab")
    keyboard.press("Enter")
    expect(chat.page.get_by_role("menuitem", name="Rename")).to_be_focused()
    keyboard.press("ArrowDown")
    expect(chat.page.get_by_role("menuitem", name="Pin")).to_be_focused()
    keyboard.press("ArrowUp")
    keyboard.press("Enter")
    expect(chat.page.get_by_role("textbox", name="Rename")).to_be_focused()
    keyboard.type("by keyboard")
    keyboard.press("Enter")
    expect(chat.sessions).to_have_text(["by keyboard"])
    # Shortcuts open the dialogs, and Escape closes them.
    for shortcut, name in (
        ("Control+k", "Search"),
        ("Control+,", "Settings"),
        ("Control+/", "Keyboard shortcuts"),
    ):
        keyboard.press(shortcut)
        expect(chat.page.get_by_role("dialog", name=name)).to_be_visible()
        keyboard.press("Escape")
        expect(chat.page.get_by_role("dialog")).to_have_count(0)
    keyboard.press("Control+b")
    expect(chat.sessions).to_have_count(0)
    keyboard.press("Control+b")
    expect(chat.sessions).to_have_count(1)
    keyboard.press("Control+Shift+O")
    expect(chat.user_messages).to_have_count(0)
    expect(chat.message).to_be_focused()


def test_escape_stops_the_completion(steady_chat: Chat, steady: Server) -> None:
    steady_chat.send("Hello")
    expect(steady_chat.text).not_to_be_empty()
    steady_chat.page.keyboard.press("Escape")
    expect(steady_chat.completion).to_contain_text("stopped by you")
    steady.until("vllm:num_requests_running", 0)


def test_the_help_sheet_names_the_shortcuts(chat: Chat) -> None:
    chat.page.keyboard.press("Control+/")
    sheet = chat.page.get_by_role("dialog", name="Keyboard shortcuts")
    for action in ("New chat", "Search", "stop the answer", "Edit the last message", "Send", "New line"):
        expect(sheet.get_by_role("term").filter(has_text=action).first).to_be_visible()


def test_a_screen_reader_announces_the_end_and_not_every_word(fed: Chat) -> None:
    live = fed.page.locator("[aria-live=polite]")
    fed.send("q")
    fed.feed("one ", "two ")
    expect(live).to_have_text("")
    assert fed.text.evaluate("(prose) => prose.closest('[aria-live], [role=log], [role=status]')") is None
    expect(fed.completion).to_have_attribute("aria-busy", "true")
    fed.end()
    expect(live).to_have_text("Answer finished. one two")
    expect(fed.completion).to_have_attribute("aria-busy", "false")
