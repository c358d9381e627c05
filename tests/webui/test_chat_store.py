"""With `--chat-store`, chats appear in a second browser and survive a cleared one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Route, expect

from chatpage import COMPLETIONS, Chat
from serving import GOLDENS, Server, serving


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the tiny model with a chat store."""
    folder = tmp_path_factory.mktemp("keeping")
    with serving(
        folder, str(GOLDENS / "qwen2-tied-bf16"), "--chat-store", str(folder / "chats.db")
    ) as server:
        yield server


def stored(server: Server, n: int) -> None:
    """Wait until the store has `n` chats that are not deleted."""

    def is_stored() -> bool:
        listed = server.http.get("/v1/chats").json()["data"]
        return sum(not change["deleted"] for change in listed) == n

    server.wait_for(is_stored)


def synchronize(chat: Chat) -> None:
    """Make the web UI synchronize with the server, as when it is shown again."""
    chat.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def has_versions(chat: Chat, versions: Locator) -> bool:
    """Return whether the web UI shows versions; if not, synchronize it again."""
    if versions.count() > 0:
        return True
    synchronize(chat)
    return False


def answered(context: BrowserContext, server: Server, message: str) -> Chat:
    """Open the web UI with one chat, whose answer is "yes" and which the store has."""
    chat = Chat.open(context, server.url)
    chat.complete_with("yes")
    chat.send(message)
    chat.done()
    stored(server, 1)
    return chat


def test_a_second_browser_shows_the_chats(keeping: Server, context: BrowserContext, browser: Browser) -> None:
    first = Chat.open(context, keeping.url)
    first.with_fields(max_tokens=5, ignore_eos=True)
    first.send("carried over")
    first.done()
    stored(keeping, 1)
    completion = first.text.inner_text()
    other = browser.new_context()
    second = Chat.open(other, keeping.url)
    expect(second.sessions).to_have_text(["carried over"])
    second.sessions.first.click()
    expect(second.user_texts).to_have_text(["carried over"])
    expect(second.text).to_have_text(" ".join(completion.split()))
    # A change in the second browser reaches the first without a reload.
    second.menu("carried over", "Rename")
    second.page.get_by_role("textbox", name="Rename").fill("renamed there")
    second.page.keyboard.press("Enter")
    second.complete_with("said there")
    second.send("more")
    expect(second.text).to_have_text("said there")
    (change,) = (each for each in keeping.http.get("/v1/chats").json()["data"] if not each["deleted"])
    keeping.wait_for(lambda: "said there" in keeping.http.get(f"/v1/chats/{change['id']}").text)
    synchronize(first)
    expect(first.sessions).to_have_text(["renamed there"])
    expect(first.user_texts).to_have_text(["carried over", "more"])
    # A deletion does, too.
    second.menu("renamed there", "Delete")
    stored(keeping, 0)
    synchronize(first)
    expect(first.sessions).to_have_count(0)
    expect(first.user_messages).to_have_count(0)
    other.close()
    assert first.complaints == []


def test_a_second_browser_shows_why_there_is_no_completion(
    keeping: Server, context: BrowserContext, browser: Browser
) -> None:
    """A failed one shows its error, one that was stopped before its first token its end."""
    first = Chat.open(context, keeping.url)
    first.fail_with(500, "request_failed", "It broke.")
    first.send("fails")
    first.done()
    first.button("New chat").first.click()
    first.page.unroute(COMPLETIONS)
    held: list[Route] = []
    first.page.route(COMPLETIONS, lambda route: held.append(route))
    first.send("stops")
    expect(first.completion).to_contain_text("Waiting for the first word")
    first.button("Stop").click()
    first.done()
    stored(keeping, 2)
    other = browser.new_context()
    second = Chat.open(other, keeping.url)
    second.sessions.filter(has_text="fails").click()
    expect(second.completion.get_by_role("alert")).to_contain_text("It broke.")
    second.sessions.filter(has_text="stops").click()
    expect(second.completion).to_contain_text("stopped by you")
    second.complete_with("now")
    second.completion.get_by_role("button", name="Try again").click()
    expect(second.text).to_have_text("now")
    second.done()
    other.close()
    for title in ("fails", "stops"):
        first.menu(title, "Delete")
    stored(keeping, 0)


def test_concurrent_messages_of_two_browsers_are_merged(
    keeping: Server, context: BrowserContext, browser: Browser
) -> None:
    first = answered(context, keeping, "begin")
    other = browser.new_context()
    second = Chat.open(other, keeping.url)
    expect(second.sessions).to_have_text(["begin"])
    second.sessions.first.click()
    expect(second.text).to_have_text("yes")
    # Both continue while neither reaches the store.
    for chat, text in ((first, "from the first"), (second, "from the second")):
        chat.page.route("**/v1/chats**", lambda route: route.abort())
        chat.complete_with(text)
        chat.send(f"question {text}")
        expect(chat.text).to_have_text(text)
        chat.done()
    first.page.unroute("**/v1/chats**")
    second.page.unroute("**/v1/chats**")
    for chat in (first, second):
        synchronize(chat)
    for chat in (first, second):
        versions = chat.page.get_by_role("group", name="Versions")
        chat.wait_for(lambda chat=chat, versions=versions: has_versions(chat, versions))
        expect(versions.last).to_contain_text("/2")
    other.close()
    first.menu("begin", "Delete")
    stored(keeping, 0)


def test_a_draft_outlives_its_chat(keeping: Server, context: BrowserContext, browser: Browser) -> None:
    """What is being written in a chat that another browser deletes moves to a new chat."""
    first = answered(context, keeping, "soon deleted")
    other = browser.new_context()
    second = Chat.open(other, keeping.url)
    second.menu("soon deleted", "Delete")
    stored(keeping, 0)
    other.close()
    first.user_messages.first.hover()
    first.user_messages.first.get_by_role("button", name="Edit message").click()
    first.page.get_by_role("textbox", name="Edit message").fill("an edit")
    first.message.fill("half a thought")
    synchronize(first)
    expect(first.sessions).to_have_count(0)
    expect(first.message).to_have_value("half a thought\n\nan edit")
    expect(first.page.get_by_text("Its unsent text is in a new chat.")).to_be_visible()
    assert first.page.url.endswith("#/")


def test_a_link_opens_a_chat_that_only_the_server_has(
    keeping: Server, context: BrowserContext, browser: Browser
) -> None:
    first = answered(context, keeping, "linked")
    other = browser.new_context()
    second = Chat.open(other, first.page.url)
    expect(second.user_texts).to_have_text(["linked"])
    assert second.page.url == first.page.url
    other.close()
    first.menu("linked", "Delete")
    stored(keeping, 0)


def test_chats_outlive_the_server_and_a_cleared_browser(tmp_path: Path, browser: Browser) -> None:
    flags = ("--chat-store", str(tmp_path / "chats.db"))
    for round_trip in range(2):
        context = browser.new_context()
        with serving(tmp_path, str(GOLDENS / "qwen2-tied-bf16"), *flags) as server:
            chat = Chat.open(context, server.url)
            if round_trip == 0:
                chat.complete_with("kept")
                chat.send("q")
                chat.done()
                stored(server, 1)
            else:
                chat.sessions.first.click()
                expect(chat.text).to_have_text("kept")
            chat.page.close()
            assert server.stop() == 0
        context.close()


def test_a_rejected_write_is_tried_again(keeping: Server, context: BrowserContext) -> None:
    """After a 429 the web UI keeps the chat for the next try."""
    chat = Chat.open(context, keeping.url)
    refusals = iter((429,))

    def refuse(route: Route) -> None:
        status = next(refusals, None) if route.request.method == "PUT" else None
        if status is None:
            route.continue_()
        else:
            error = {
                "message": "later",
                "type": "rate_limit_error",
                "param": None,
                "code": "rate_limit_exceeded",
            }
            route.fulfill(status=status, json={"error": error}, headers={"retry-after": "1"})

    chat.page.route("**/v1/chats/**", refuse)
    chat.complete_with("kept")
    with chat.page.expect_response(lambda response: response.request.method == "PUT" and response.ok):
        chat.send("refused at first")
        chat.done()
    assert next(refusals, None) is None
    chat.page.unroute_all()
    stored(keeping, 1)
    chat.menu("refused at first", "Delete")
    stored(keeping, 0)


def test_a_file_that_is_no_store_prevents_the_start(tmp_path: Path) -> None:
    file = tmp_path / "chats.db"
    file.write_text("no database at all, whatever its name says. " * 50, "utf-8")
    flags = ("--chat-store", str(file))
    with (
        pytest.raises(AssertionError, match="cannot be used as a chat store"),
        serving(tmp_path, str(GOLDENS / "qwen2-tied-bf16"), *flags),
    ):
        pass
