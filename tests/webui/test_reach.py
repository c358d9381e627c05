"""The web UI by finger, by keyboard, and in forced colors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from chatpage import Chat
from serving import Server

# Everything visible that is smaller than a finger or a mouse needs, except links inside a text.
SMALL = """
(least) => {
    const all =
        "button, a[href], select, summary, textarea, input:not([type=checkbox]), label:has([type=checkbox])";
    return [...document.querySelectorAll(all)]
        .filter((element) => element.checkVisibility({ visibilityProperty: true }))
        .filter((element) => !element.matches(".prose :is(p, li, td) a, .skip"))
        .map((element) => [element, element.getBoundingClientRect()])
        .filter(([, { width, height }]) => width > 0 && (width < least - 0.1 || height < least - 0.1))
        .map(([{ outerHTML }, { width, height }]) => `${width} x ${height}: ${outerHTML.slice(0, 120)}`);
}
"""
RICH = "A [link](https://example.com).\n\n```python\nprint(1)\n```"


@pytest.fixture
def phone(browser: Browser, tiny: Server) -> Iterator[Chat]:
    """Open the web UI on a phone."""
    context = browser.new_context(
        viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True, reduced_motion="reduce"
    )
    yield Chat.open(context, tiny.url)
    context.close()


def small_targets(chat: Chat, least: int) -> dict[str, list[str]]:
    """Return, for each view, the targets that are smaller than `least` pixels."""
    views = {"welcome": chat.page.evaluate(SMALL, least)}
    chat.complete_with({"reasoning_content": "hm"}, RICH, finish="length")
    chat.message.fill("one")
    chat.button("Send").click()
    chat.done()
    chat.completion.get_by_role("button", name="Regenerate").click()
    expect(chat.completion.get_by_role("group", name="Versions")).to_have_text("2/2")
    chat.done()
    chat.user_messages.first.get_by_role("button", name="Delete message").click()
    views["deleted"] = chat.page.evaluate(SMALL, least)
    chat.button("Undo").click()
    expect(chat.completions).to_have_count(1)
    views["conversation"] = chat.page.evaluate(SMALL, least)
    for name in ("Server status", "Settings"):
        chat.button(name).click()
        views[name] = chat.page.evaluate(SMALL, least)
        chat.button("Close").last.click()
    if chat.sessions.count() == 0:
        chat.button("Chat list").click()
    chat.page.get_by_role("navigation").get_by_role("button", name="Actions for").first.click()
    expect(chat.page.get_by_role("menu")).to_be_visible()
    views["list and menu"] = chat.page.evaluate(SMALL, least)
    return {view: small for view, small in views.items() if small}


def test_a_finger_hits_every_button(phone: Chat) -> None:
    assert small_targets(phone, 44) == {}
    assert phone.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_mouse_hits_every_button(chat: Chat) -> None:
    assert small_targets(chat, 24) == {}


def test_on_a_phone_enter_is_a_line_break_and_the_button_sends(phone: Chat) -> None:
    phone.complete_with("yes")
    expect(phone.message).to_have_attribute("enterkeyhint", "enter")
    phone.message.tap()
    phone.page.keyboard.type("one")
    phone.page.keyboard.press("Enter")
    phone.page.keyboard.type("two")
    expect(phone.message).to_have_value("one\ntwo")
    phone.button("Send").tap()
    expect(phone.user_texts).to_have_text(["one\ntwo"], use_inner_text=True)
    # A keyboard at a tablet has Ctrl.
    phone.done()
    phone.message.fill("three")
    phone.message.press("Control+Enter")
    expect(phone.user_texts).to_have_count(2)


def test_a_link_skips_to_the_message_field(chat: Chat) -> None:
    address = chat.page.url
    chat.page.get_by_role("navigation").get_by_role("button", name="Search").press("Shift+Tab")
    skip = chat.page.get_by_role("link", name="Skip to the message field")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport(ratio=1)
    chat.page.keyboard.press("Enter")
    expect(chat.message).to_be_focused()
    assert chat.page.url == address


def test_the_chat_list_is_one_tab_stop(chat: Chat) -> None:
    """Tab reaches the shown chat and its menu; the arrow keys reach the others."""
    chat.complete_with("yes")
    for title in ("one", "two", "three", "four"):
        chat.page.keyboard.press("Control+Shift+O")
        chat.send(title)
        expect(chat.sessions.first).to_have_text(title)
        chat.done()
    chat.sessions.filter(has_text="two").click()
    expect(chat.user_texts).to_have_text(["two"])
    chat.page.evaluate("document.activeElement.blur()")
    stops = []
    for _ in range(40):
        chat.page.keyboard.press("Tab")
        stops.append(chat.page.evaluate("document.activeElement.closest('nav [data-key]')?.innerText.trim()"))
        if chat.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Chat list":
            break
    assert [stop for stop in stops if stop] == ["two", "two"]
    keyboard = chat.page.keyboard
    chat.sessions.filter(has_text="two").focus()
    for key, title in (("ArrowUp", "three"), ("ArrowUp", "four"), ("ArrowDown", "three"), ("End", "one")):
        keyboard.press(key)
        expect(chat.sessions.filter(has_text=title)).to_be_focused()
    keyboard.press("Enter")
    expect(chat.user_texts).to_have_text(["one"])
    chat.sessions.filter(has_text="one").focus()
    keyboard.press("Home")
    expect(chat.button("Today")).to_be_focused()


def test_the_arrow_keys_reach_rows_that_are_not_mounted(chat: Chat) -> None:
    chats = [
        {"title": f"chat {i}", "messages": [{"id": "m", "parent": None, "role": "user", "content": "q"}]}
        for i in range(300)
    ]
    text = f'{{"format": "llaisys-chats", "version": 1, "chats": {chats}}}'.replace("'", '"').replace(
        "None", "null"
    )
    file = {"name": "many.json", "mimeType": "application/json", "buffer": text.encode()}
    chat.page.locator("input[type=file]").set_input_files(file)
    expect(chat.page.get_by_text("300 chat(s) imported.")).to_be_visible()
    chat.sessions.first.focus()
    chat.page.keyboard.press("End")
    expect(chat.sessions.last).to_be_focused()
    expect(chat.sessions.last).to_be_in_viewport(ratio=0.9)


def test_forced_colors_show_what_a_background_showed(chat: Chat) -> None:
    chat.page.emulate_media(forced_colors="active")
    chat.complete_with("yes")
    chat.send("one")
    chat.done()
    background = "(element) => getComputedStyle(element).backgroundColor"
    canvas = chat.page.locator("body").evaluate(background)
    assert chat.page.locator("header .dot").evaluate(background) != canvas
    expect(chat.user_texts.first).to_have_css("border-style", "solid")
    expect(chat.page.locator(".row.current")).to_have_css("outline-style", "solid")
    chat.sessions.first.hover()
    chat.page.get_by_role("navigation").get_by_role("button", name="Actions for").press("Enter")
    item = chat.page.get_by_role("menuitem", name="Rename")
    expect(item).to_be_focused()
    expect(item).to_have_css("outline-style", "solid")
    chat.page.keyboard.press("Escape")
    chat.message.focus()
    expect(chat.page.locator(".composer .box")).to_have_css("outline-style", "solid")
    chat.button("Server status").click()
    expect(chat.button("Server status")).to_have_css("outline-style", "solid")
