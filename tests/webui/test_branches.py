"""The branch map: every version, the difference of two, pinned branches; regenerating with other settings."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator, expect

from axe import violations
from chatpage import COMPLETIONS, Chat
from serving import Server


def rows(chat: Chat) -> Locator:
    return chat.page.get_by_role("dialog", name="Branch map").get_by_role("listitem")


def branch(chat: Chat) -> None:
    """Create a chat with two versions of the first answer, and a second turn after the newer one."""
    for completion, action in (("The moon pulls.", None), ("The sun pulls.", "Regenerate")):
        chat.complete_with(completion)
        if action is None:
            chat.send("Why tides?")
        else:
            chat.completion.get_by_role("button", name=action, exact=True).click()
        expect(chat.text).to_have_text(completion)
        chat.done()
    chat.complete_with("Twice a day.")
    chat.send("How often?")
    expect(chat.text).to_have_text("Twice a day.")
    chat.done()


def test_the_map_has_every_version_and_shows_its_branch(chat: Chat) -> None:
    branch(chat)
    chat.page.keyboard.press("Control+Shift+L")
    expect(rows(chat).locator(".text")).to_have_text(
        ["Why tides?", "The moon pulls.", "The sun pulls.", "How often?", "Twice a day."]
    )
    expect(rows(chat).filter(has_text="The moon")).to_contain_text("1/2")
    assert violations(chat.page) == []
    rows(chat).get_by_role("button", name="The moon pulls.").click()
    expect(chat.page.get_by_role("dialog")).to_have_count(0)
    expect(chat.text).to_have_text("The moon pulls.")
    expect(chat.user_messages).to_have_count(1)
    chat.page.keyboard.press("Control+Shift+L")
    current = rows(chat).locator("[aria-current=true] .text")
    expect(current).to_have_text(["Why tides?", "The moon pulls."])
    assert chat.complaints == []


def test_two_marked_versions_show_their_difference(chat: Chat) -> None:
    branch(chat)
    chat.menu("Why tides?", "Branch map")
    for name in ("The moon", "The sun"):
        rows(chat).filter(has_text=name).get_by_role("checkbox").check()
    difference = chat.page.get_by_role("region", name="Difference")
    expect(difference).to_have_text("The moonsun pulls.")
    expect(difference.locator("del")).to_have_text("moon")
    expect(difference.locator("ins")).to_have_text("sun")
    assert violations(chat.page) == []
    # A third mark takes the place of the oldest.
    rows(chat).filter(has_text="Why tides?").get_by_role("checkbox").check()
    expect(rows(chat).filter(has_text="The moon").get_by_role("checkbox")).not_to_be_checked()
    rows(chat).filter(has_text="The sun").get_by_role("checkbox").uncheck()
    expect(difference).to_have_count(0)


def test_a_pinned_branch_keeps_its_tokens_on_the_server(chat: Chat, tiny: Server) -> None:
    chat.with_fields(max_tokens=8, ignore_eos=True)
    chat.send("Hello")
    chat.done()
    chat.page.keyboard.press("Control+Shift+L")
    chat.button("Keep this branch in the server's cache").click()
    pinned = rows(chat).last.locator(".pinned")
    expect(pinned).to_contain_text("tokens kept")
    sessions: list[dict[str, Any]] = tiny.http.get("/v1/sessions").json()["data"]
    (session,) = sessions
    assert session["num_pinned_tokens"] >= 8
    expect(pinned).to_have_text(f"{session['num_pinned_tokens']} tokens kept")
    chat.button("Release this branch from the server's cache").click()
    expect(pinned).to_have_count(0)
    assert tiny.http.get("/v1/sessions").json()["data"] == []
    assert chat.complaints == []


def test_an_answer_is_regenerated_with_another_model_or_temperature(chat: Chat) -> None:
    branch(chat)
    menu = chat.completion.get_by_role("button", name="Answer with other settings")
    for item, expected in (("With other", ("other", None)), ("With temperature 0.7", ("tiny", 0.7))):
        menu.click()
        with chat.page.expect_request(COMPLETIONS) as request:
            chat.page.get_by_role("menuitem", name=item, exact=True).click()
        body = request.value.post_data_json
        assert (body["model"], body.get("temperature")) == expected
        chat.done()
    expect(chat.completion.get_by_role("group", name="Versions")).to_have_text("3/3")
    # The settings of the chat stay.
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.send("And then?")
    body = request.value.post_data_json
    assert (body["model"], body.get("temperature")) == ("tiny", None)
