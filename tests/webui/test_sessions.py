"""The list of chats: titles, folders, search, undo, files, and thousands of entries."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import BrowserContext, expect

from chatpage import Chat
from serving import Server


def three(chat: Chat) -> None:
    """Create chats `alpha`, `beta` and `gamma`; the last is shown, and beta's completion mentions tides."""
    for message, completion in (("alpha", "one"), ("beta", "the Tides rise"), ("gamma", "three")):
        chat.complete_with(completion)
        chat.page.keyboard.press("Control+Shift+O")
        chat.send(message)
        expect(chat.text).to_have_text(completion)
        chat.done()


def chats_file(n: int, n_messages: int) -> str:
    """Return an export with `n` chats of `n_messages` messages each."""
    chats = [
        {
            "title": f"chat {i}",
            "createdMs": 1_700_000_000_000 + i,
            "updatedMs": 1_700_000_000_000 + i,
            "messages": [
                {
                    "id": f"m{k}",
                    "parent": f"m{k - 1}" if k else None,
                    "role": "assistant" if k % 2 else "user",
                    "content": f"message {k} of chat {i}\n\n" + "A paragraph of some length. " * (k % 7),
                    "createdMs": 1_700_000_000_000 + k,
                    "end": "stop",
                }
                for k in range(n_messages)
            ],
        }
        for i in range(n)
    ]
    return json.dumps({"format": "llaisys-chats", "version": 1, "chats": chats})


def test_chats_are_titled_by_their_first_message_and_renamed(chat: Chat) -> None:
    chat.complete_with("yes")
    chat.send("## What is *gravity*?\nIn one line.")
    expect(chat.sessions).to_have_text(["What is *gravity*?"])
    chat.menu("gravity", "Rename")
    field = chat.page.get_by_role("textbox", name="Rename")
    field.fill("Falling \u202ethings")
    field.press("Enter")
    expect(chat.sessions).to_have_text(["Falling things"])
    chat.reload()
    expect(chat.sessions).to_have_text(["Falling things"])
    expect(chat.page.get_by_role("heading", level=1)).to_have_text("Falling things")


def test_pins_and_folders_sort_the_list(chat: Chat) -> None:
    three(chat)
    expect(chat.sessions).to_have_text(["gamma", "beta", "alpha"])
    chat.menu("alpha", "Pin")
    expect(chat.sessions).to_have_text(["alpha", "gamma", "beta"])
    chat.menu("beta", "Move to folder")
    field = chat.page.get_by_label("Folder (empty: none)")
    field.fill("work")
    field.press("Enter")
    expect(chat.sessions).to_have_text(["alpha", "beta", "gamma"])
    chat.reload()
    expect(chat.sessions).to_have_text(["alpha", "beta", "gamma"])
    folder = chat.button("work")
    expect(folder).to_have_attribute("aria-expanded", "true")
    folder.click()
    expect(chat.sessions).to_have_text(["alpha", "gamma"])


def test_search_finds_titles_and_texts_and_opens_the_chat(chat: Chat) -> None:
    three(chat)
    chat.page.keyboard.press("Control+K")
    field = chat.page.get_by_role("searchbox", name="Search titles and messages")
    expect(field).to_be_focused()
    hits = chat.page.get_by_role("dialog").get_by_role("listitem")
    field.fill("tides RISE")
    expect(hits).to_have_count(1)
    expect(hits.locator("mark")).to_have_text("Tides")
    field.fill("alp")
    expect(hits).to_have_count(2)
    field.fill("no such word")
    expect(chat.page.get_by_text("Nothing found.")).to_be_visible()
    field.fill("tides")
    expect(hits).to_have_count(1)
    field.press("Enter")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)
    expect(chat.user_texts).to_have_text(["beta"])
    expect(chat.text).to_be_in_viewport()


def test_a_deleted_chat_can_be_restored(chat: Chat) -> None:
    three(chat)
    chat.menu("beta", "Delete")
    expect(chat.sessions).to_have_text(["gamma", "alpha"])
    chat.button("Undo").click()
    expect(chat.sessions).to_have_text(["gamma", "beta", "alpha"])
    chat.menu("gamma", "Delete")
    expect(chat.user_messages).to_have_count(0)
    chat.reload()
    expect(chat.sessions).to_have_text(["beta", "alpha"])
    chat.sessions.first.click()
    expect(chat.text).to_have_text("the Tides rise")


def test_json_carries_everything_to_another_browser(chat: Chat, tiny: Server, tmp_path: Path) -> None:
    three(chat)
    chat.complete_with("other")
    chat.completion.get_by_role("button", name="Regenerate").click()
    expect(chat.text).to_have_text("other")
    chat.done()
    chat.page.get_by_role("navigation").get_by_role("button", name="More", exact=True).click()
    with chat.page.expect_download() as download:
        chat.page.get_by_role("menuitem", name="Export all chats").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    assert download.value.suggested_filename == "llaisys-chats.json"
    browser = chat.page.context.browser
    assert browser is not None
    second = Chat.open(browser.new_context(), tiny.url)
    second.import_text("chats.json", file.read_text("utf-8"))
    expect(second.sessions).to_have_text(["gamma", "beta", "alpha"])
    second.sessions.first.click()
    expect(second.text).to_have_text("other")
    second.completion.get_by_role("button", name="Previous version").click()
    expect(second.text).to_have_text("three")
    second.import_text("chats.json", file.read_text("utf-8"))
    expect(second.sessions).to_have_count(6)
    second.page.context.close()


def test_markdown_is_exported_and_imported(chat: Chat, tmp_path: Path) -> None:
    chat.complete_with("# Answer\n\n- one")
    chat.send("a question")
    chat.done()
    with chat.page.expect_download() as download:
        chat.menu("a question", "Export as Markdown")
    file = tmp_path / "chat.md"
    download.value.save_as(file)
    text = file.read_text("utf-8")
    assert text.startswith("# a question\n")
    assert "**You**\n\na question\n" in text
    chat.menu("a question", "Delete")
    chat.import_text("chat.md", text)
    expect(chat.user_texts).to_have_text(["a question"])
    expect(chat.text).to_have_text("Answer one")


def test_an_invalid_file_is_rejected_by_name(chat: Chat) -> None:
    chat.import_text("holiday.json", "{")
    expect(chat.page.get_by_text("holiday.json is not valid JSON.")).to_be_visible()
    expect(chat.sessions).to_have_count(0)


def test_of_thousands_of_chats_only_visible_ones_are_mounted(chat: Chat) -> None:
    chat.import_text("many.json", chats_file(3000, 2))
    expect(chat.page.get_by_text("3000 chat(s) imported.")).to_be_visible()
    expect(chat.sessions.first).to_have_text("chat 2999")
    assert chat.sessions.count() < 60
    chat.page.get_by_role("list", name="Chats").evaluate("(list) => list.scrollTo(0, list.scrollHeight)")
    expect(chat.sessions.last).to_have_text("chat 0")
    assert chat.sessions.count() < 60
    chat.page.keyboard.press("Control+K")
    chat.page.get_by_role("searchbox").fill("1234 message")
    hits = chat.page.get_by_role("dialog").get_by_role("listitem")
    expect(hits).to_have_count(2)
    chat.page.keyboard.press("Enter")
    expect(chat.completion).to_contain_text("message 1 of chat 1234")


def test_of_a_long_chat_only_visible_messages_are_mounted(chat: Chat) -> None:
    chat.import_text("long.json", chats_file(1, 2000))
    expect(chat.completion).to_contain_text("message 1999 of chat 0")
    mounted = chat.page.get_by_role("article")
    most = 0
    for place in (0.0, 0.25, 0.5, 0.75, 1.0):
        chat.page.get_by_role("region", name="Conversation").evaluate(
            "async (list, place) => {"
            "  list.scrollTop = place * list.scrollHeight;"
            "  for (let i = 0; i < 10; i++) await new Promise(requestAnimationFrame);"
            "}",
            place,
        )
        most = max(most, mounted.count())
        expect(mounted.last).to_be_visible()
    # A view of 800 pixels and the margin of 400 on both sides, rows of at least 70 pixels.
    assert most <= 1600 / 70 + 2


def test_drafts_stay_with_their_chats(chat: Chat, tiny: Server, context: BrowserContext) -> None:
    chat.complete_with("yes")
    chat.send("first")
    chat.done()
    chat.message.fill("a draft of the first")
    chat.button("New chat").first.click()
    expect(chat.message).to_have_value("")
    chat.message.fill("a draft of a new one")
    chat.sessions.first.click()
    expect(chat.message).to_have_value("a draft of the first")
    chat.message.press("End")
    chat.message.press_sequentially(", longer")
    chat.message.blur()
    chat.settle()
    chat.page.close()
    chat.page = Chat.open(context, tiny.url).page
    expect(chat.message).to_have_value("a draft of a new one")
    chat.sessions.first.click()
    expect(chat.message).to_have_value("a draft of the first, longer")
