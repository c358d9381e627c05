"""The keyboard focus never falls to the body, and Escape closes what is on top only."""

from __future__ import annotations

from playwright.sync_api import Browser, expect

from chatpage import Chat
from serving import Server


def talk(chat: Chat, *messages: str) -> None:
    """Send messages, each answered with "yes"."""
    chat.complete_with("yes")
    for i, message in enumerate(messages, 1):
        chat.send(message)
        expect(chat.completions).to_have_count(i)
        chat.done()


def test_escape_closes_a_menu_and_the_completion_continues(fed: Chat) -> None:
    fed.send("q")
    fed.feed("one ")
    expect(fed.text).to_have_text("one")
    for menu, text in (("Actions for", "two "), ("More", "three ")):
        fed.page.get_by_role("navigation").get_by_role("button", name=menu).first.click()
        expect(fed.page.get_by_role("menu")).to_be_visible()
        fed.page.keyboard.press("Escape")
        expect(fed.page.get_by_role("menu")).to_have_count(0)
        fed.feed(text)
        expect(fed.text).to_contain_text(text.strip())
    # Escape also closes the list of models.
    fed.page.get_by_label("Model", exact=True).press("Escape")
    fed.feed("four")
    expect(fed.text).to_have_text("one two three four")
    fed.message.press("Escape")
    expect(fed.completion).to_contain_text("stopped by you")


def test_a_closed_dialog_or_panel_returns_the_focus(chat: Chat) -> None:
    opener = chat.button("Server status")
    opener.focus()
    for shortcut in ("Control+K", "Control+,", "Control+/"):
        for way in ("Escape", "Close"):
            chat.page.keyboard.press(shortcut)
            expect(chat.page.get_by_role("dialog")).to_be_visible()
            if way == "Escape":
                chat.page.keyboard.press("Escape")
            else:
                chat.page.get_by_role("dialog").get_by_role("button", name="Close").press("Enter")
            expect(chat.page.get_by_role("dialog")).to_have_count(0)
            expect(opener).to_be_focused()
    opener.press("Enter")
    chat.page.get_by_role("complementary").get_by_role("button", name="Close").press("Enter")
    expect(opener).to_be_focused()


def test_an_edit_returns_the_focus_to_where_it_began(chat: Chat) -> None:
    talk(chat, "one")
    for message, name in ((chat.user_messages.last, "Edit message"), (chat.completion, "Edit answer")):
        for leave in ("Escape", "Cancel"):
            message.get_by_role("button", name=name).press("Enter")
            expect(chat.page.get_by_role("textbox", name=name)).to_be_focused()
            if leave == "Escape":
                chat.page.keyboard.press("Escape")
            else:
                chat.button("Cancel").press("Enter")
            expect(message.get_by_role("button", name=name)).to_be_focused()
    # An edit that began in the message field ends there.
    chat.message.press("ArrowUp")
    expect(chat.page.get_by_role("textbox", name="Edit message")).to_be_focused()
    chat.page.keyboard.press("Escape")
    expect(chat.message).to_be_focused()


def test_saving_an_edit_moves_the_focus_to_the_message_field(chat: Chat) -> None:
    talk(chat, "one")
    chat.user_messages.last.get_by_role("button", name="Edit message").press("Enter")
    chat.page.keyboard.type(" more")
    chat.page.keyboard.press("Control+Enter")
    expect(chat.user_texts).to_have_text(["one more"])
    expect(chat.message).to_be_focused()


def test_switching_versions_keeps_the_focus_on_the_arrow(chat: Chat) -> None:
    talk(chat, "one")
    chat.completion.get_by_role("button", name="Regenerate").press("Enter")
    expect(chat.completion.get_by_role("group", name="Versions")).to_have_text("2/2")
    chat.done()
    expect(chat.message).to_be_focused()
    for shown in ("1/2", "2/2"):
        chat.completion.get_by_role("button", name="Previous version").press("Enter")
        expect(chat.completion.get_by_role("group", name="Versions")).to_have_text(shown)
        expect(chat.completion.get_by_role("button", name="Previous version")).to_be_focused()


def test_a_deleted_message_leaves_the_focus_in_the_message_field(chat: Chat) -> None:
    talk(chat, "one", "two")
    chat.user_messages.last.get_by_role("button", name="Delete message").press("Enter")
    expect(chat.user_texts).to_have_text(["one"])
    expect(chat.message).to_be_focused()
    chat.button("Undo").press("Enter")
    expect(chat.user_texts).to_have_text(["one", "two"])
    expect(chat.message).to_be_focused()


def test_the_chat_list_keeps_the_focus(chat: Chat) -> None:
    chat.complete_with("yes")
    for title in ("alpha", "beta", "gamma"):
        chat.page.keyboard.press("Control+Shift+O")
        chat.send(title)
        expect(chat.sessions.first).to_have_text(title)
        chat.done()
    for leave in ("Enter", "Escape"):
        chat.menu("beta", "Rename")
        chat.page.get_by_role("textbox", name="Rename").press(leave)
        expect(chat.sessions.filter(has_text="beta")).to_be_focused()
    chat.menu("alpha", "Pin")
    expect(chat.sessions).to_have_text(["alpha", "gamma", "beta"])
    expect(chat.sessions.filter(has_text="alpha")).to_be_focused()
    # After a deletion: the next chat, else the previous one; after the shown chat, the message field.
    chat.menu("alpha", "Delete")
    expect(chat.sessions).to_have_text(["gamma", "beta"])
    expect(chat.sessions.filter(has_text="gamma")).to_be_focused()
    chat.menu("beta", "Delete")
    expect(chat.sessions).to_have_text(["gamma"])
    expect(chat.sessions.filter(has_text="gamma")).to_be_focused()
    chat.menu("gamma", "Delete")
    expect(chat.sessions).to_have_count(0)
    expect(chat.message).to_be_focused()


def test_on_a_phone_a_chosen_chat_does_not_open_the_keyboard(browser: Browser, tiny: Server) -> None:
    """The main region takes the focus instead of the message field."""
    context = browser.new_context(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    chat = Chat.open(context, tiny.url)
    expect(chat.page.get_by_role("main")).to_be_focused()
    chat.complete_with("yes")
    chat.message.fill("one")
    chat.button("Send").tap()
    expect(chat.text).to_have_text("yes")
    chat.done()
    chat.button("New chat").last.tap()
    expect(chat.user_messages).to_have_count(0)
    expect(chat.page.get_by_role("main")).to_be_focused()
    chat.button("Chat list").tap()
    chat.sessions.first.tap()
    expect(chat.user_texts).to_have_text(["one"])
    expect(chat.page.get_by_role("main")).to_be_focused()
    context.close()


def test_the_menu_of_the_shown_chat_is_not_bold_and_the_file_field_is_hidden(chat: Chat) -> None:
    talk(chat, "one")
    chat.sessions.first.hover()
    chat.page.get_by_role("navigation").get_by_role("button", name="Actions for").click()
    expect(chat.page.get_by_role("menuitem", name="Rename")).to_have_css("font-weight", "400")
    expect(chat.page.locator("input[type=file]")).to_be_hidden()
