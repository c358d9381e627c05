"""What a user brings along and expects: imports, waiting messages, titles by the model, shortcuts."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import FileChooser, Route, expect

from axe import violations
from chatpage import COMPLETIONS, Chat


def chatgpt(*texts: str) -> str:
    """Return a `conversations.json` of ChatGPT with one conversation of these messages."""
    mapping: dict[str, Any] = {"root": {"id": "root", "parent": None, "children": ["0"], "message": None}}
    for i, text in enumerate(texts):
        message = {
            "author": {"role": "assistant" if i % 2 else "user"},
            "create_time": 1_700_000_000 + i,
            "content": {"content_type": "text", "parts": [text]},
        }
        mapping[str(i)] = {"id": str(i), "parent": str(i - 1) if i else "root", "message": message}
    node = str(len(texts) - 1)
    return json.dumps([{"title": "From ChatGPT", "mapping": mapping, "current_node": node}])


def test_chats_of_other_programs_are_imported_and_continued(chat: Chat) -> None:
    chat.import_text("conversations.json", chatgpt("Why tides?", "The moon."))
    expect(chat.user_texts).to_have_text(["Why tides?"])
    expect(chat.text).to_have_text("The moon.")
    expect(chat.sessions).to_have_text(["From ChatGPT"])
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.complete_with("yes")
        chat.send("And the sun?")
    contents = [message["content"] for message in request.value.post_data_json["messages"]]
    assert contents == ["Why tides?", "The moon.", "And the sun?"]
    chat.done()
    open_webui = {
        "title": "From Open WebUI",
        "chat": {"history": {"messages": {"q": {"role": "user", "content": "Hi"}}, "currentId": "q"}},
    }
    chat.import_text("export.json", json.dumps([open_webui, {"chat": 7}]))
    expect(chat.page.get_by_text("1 chat(s) imported. Skipped: 1")).to_be_visible()
    conversation = {
        "conv": {"name": "From llama.cpp"},
        "messages": [{"id": "q", "role": "user", "content": "Hi"}],
    }
    chat.import_text("conversation.json", json.dumps(conversation))
    names = {"From ChatGPT", "From Open WebUI", "From llama.cpp"}
    expect(chat.sessions).to_have_count(3)
    assert set(chat.sessions.all_text_contents()) == names


def test_a_wrong_import_is_refused_by_name(chat: Chat) -> None:
    chat.import_text("export.zip", "PK\x03\x04")
    expect(chat.page.get_by_text("export.zip is a ZIP archive. Unpack it")).to_be_visible()
    chat.import_text("holiday.json", '{"photos": []}')
    expect(chat.page.get_by_text("holiday.json holds no chats of this page, ChatGPT")).to_be_visible()
    expect(chat.sessions).to_have_count(0)


def test_messages_written_during_an_answer_are_sent_after_it(fed: Chat) -> None:
    queue = fed.page.get_by_role("region", name="Waiting messages")
    fed.send("first")
    fed.feed("one")
    for text in ("second", "third", "fourth"):
        fed.send(text)
    expect(queue.get_by_role("listitem")).to_have_text(["second", "third", "fourth"])
    expect(fed.user_texts).to_have_text(["first"])
    assert violations(fed.page) == []
    # A waiting message can be edited and removed.
    queue.get_by_role("button", name="Edit message").first.click()
    box = queue.get_by_role("textbox", name="Edit message")
    box.fill("second, better")
    box.press("Control+Enter")
    queue.get_by_role("button", name="Remove from the queue").nth(1).click()
    expect(queue.get_by_role("listitem")).to_have_text(["second, better", "fourth"])
    fed.page.evaluate("feed.end(); window.feed = null")
    expect(fed.user_texts).to_have_text(["first", "second, better"])
    expect(queue.get_by_role("listitem")).to_have_text(["fourth"])
    # A stopped answer holds the rest, also after a reload, until the user sends it.
    fed.feed("two")
    fed.button("Stop").click()
    expect(queue).to_contain_text("Not sent yet")
    fed.reload()
    fed.sessions.first.click()
    expect(queue.get_by_role("listitem")).to_have_text(["fourth"])
    fed.button("Send the next").click()
    expect(fed.user_texts).to_have_text(["first", "second, better", "fourth"])
    expect(queue).to_have_count(0)
    fed.feed("three")
    fed.end()
    assert fed.complaints == []


def test_a_waiting_message_goes_to_its_own_chat(fed: Chat) -> None:
    fed.send("first")
    fed.feed("one")
    fed.send("second")
    fed.button("New chat").first.click()
    expect(fed.page.get_by_role("region", name="Waiting messages")).to_have_count(0)
    fed.page.evaluate("feed.end(); window.feed = null")
    fed.page.wait_for_function("window.feed")
    expect(fed.user_messages).to_have_count(0)
    fed.sessions.first.click()
    expect(fed.user_texts).to_have_text(["first", "second"])
    fed.end()


def test_the_model_titles_new_chats_if_asked_to(chat: Chat) -> None:
    bodies: list[dict[str, Any]] = []

    def respond(route: Route) -> None:
        body = route.request.post_data_json
        bodies.append(body)
        text = 'Title: "Moon and sea."' if "title" in body["messages"][-1]["content"] else "The moon."
        chunk = {"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}
        content = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        route.fulfill(body=content, headers={"content-type": "text/event-stream"})

    chat.page.route(COMPLETIONS, respond)
    chat.send("Why do tides come?")
    chat.done()
    expect(chat.sessions).to_have_text(["Why do tides come?"])
    chat.page.keyboard.press("Control+,")
    chat.page.get_by_role("tab", name="Page").click()
    chat.page.get_by_label("The model titles new chats").check()
    chat.page.keyboard.press("Escape")
    assert len(bodies) == 1
    chat.page.keyboard.press("Control+Shift+O")
    chat.send("Why do tides go?")
    expect(chat.sessions).to_have_text(["Moon and sea", "Why do tides come?"])
    # The request repeats the conversation, so that its keys and values are cached.
    roles = [(message["role"], message["content"]) for message in bodies[-1]["messages"][:2]]
    assert roles == [("user", "Why do tides go?"), ("assistant", "The moon.")]
    assert bodies[-1]["max_tokens"] == 40
    chat.send("More?")
    chat.done()
    assert len(bodies) == 4
    expect(chat.page.get_by_role("heading", level=1)).to_have_text("Moon and sea")


def test_every_shortcut_of_the_help_sheet_works(chat: Chat) -> None:
    keyboard = chat.page.keyboard
    # From here on, because Playwright does not wait until the browser reports choosers.
    choosers: list[FileChooser] = []
    chat.page.on("filechooser", lambda chooser: choosers.append(chooser))
    for message, completion in (("alpha", "one"), ("beta", "two"), ("gamma", "three")):
        chat.complete_with(completion)
        keyboard.press("Control+Shift+O")
        chat.send(message)
        expect(chat.text).to_have_text(completion)
    keyboard.press("Alt+ArrowDown")
    expect(chat.user_texts).to_have_text(["beta"])
    keyboard.press("Alt+ArrowUp")
    expect(chat.user_texts).to_have_text(["gamma"])
    keyboard.press("Control+Shift+C")
    expect(chat.page.get_by_role("status").get_by_text("Copied")).to_be_visible()
    assert chat.page.evaluate("navigator.clipboard.readText()") == "three"
    chat.complete_with("another")
    keyboard.press("Control+Shift+Enter")
    expect(chat.text).to_have_text("another")
    expect(chat.completion.get_by_role("group", name="Versions")).to_have_text("2/2")
    keyboard.press("Control+.")
    expect(chat.page.get_by_role("complementary")).to_be_visible()
    keyboard.press("Control+.")
    expect(chat.page.get_by_role("complementary")).to_have_count(0)
    keyboard.press("Control+U")
    chat.wait_for(lambda: len(choosers) == 1)
    keyboard.press("Control+/")
    sheet = chat.page.get_by_role("dialog", name="Keyboard shortcuts")
    for action in ("Regenerate the last answer", "Copy the last answer", "Next chat", "Attach files"):
        expect(sheet.get_by_role("term").filter(has_text=action)).to_be_visible()
    # Behind a dialog the chat does not change.
    keyboard.press("Control+Shift+Enter")
    keyboard.press("Alt+ArrowDown")
    keyboard.press("Escape")
    expect(sheet).to_have_count(0)
    expect(chat.user_texts).to_have_text(["gamma"])
    expect(chat.completion.get_by_role("group", name="Versions")).to_have_text("2/2")
