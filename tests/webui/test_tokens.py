"""The token view: probabilities of tokens, their alternatives, and versions that continue from one."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator, Request, expect

from axe import violations
from chatpage import COMPLETIONS, Chat
from serving import Server


def watch(chat: Chat) -> list[Any]:
    """Return a list that receives the bodies of the page's completion requests."""
    bodies: list[Any] = []

    def seen(request: Request) -> None:
        if request.url.endswith(COMPLETIONS.removeprefix("**")):
            bodies.append(request.post_data_json)

    chat.page.on("request", seen)
    return bodies


def tokens(chat: Chat) -> Locator:
    """Return the tokens of the last completion."""
    return chat.completion.get_by_role("listbox").get_by_role("option")


def texts(found: Locator) -> list[str]:
    return [str(text) for text in found.evaluate_all("(all) => all.map((one) => one.textContent)")]


def complete(chat: Chat, message: str) -> None:
    chat.send(message)
    chat.done()


@pytest.fixture
def short_answers(chat: Chat) -> Chat:
    """Limit completions to 12 greedy tokens; requests keep what the page sends otherwise."""
    script = """
        (() => {
            const real = window.fetch;
            window.fetch = (url, options) => {
                if (!String(url).endsWith("/v1/chat/completions")) return real(url, options);
                const body = { temperature: 0, max_tokens: 12, ...JSON.parse(options.body) };
                return real(url, { ...options, body: JSON.stringify(body) });
            };
        })();
    """
    chat.page.evaluate(script)
    return chat


def test_an_alternative_token_begins_a_version(short_answers: Chat, tiny: Server) -> None:
    chat, bodies = short_answers, watch(short_answers)
    complete(chat, "one")
    assert "logprobs" not in bodies[0]
    chat.completion.get_by_role("button", name="Token view").click()
    complete(chat, "two")
    assert (bodies[1]["logprobs"], bodies[1]["top_logprobs"]) == (True, 5)
    shown = texts(tokens(chat))
    assert 1 < len(shown) <= 12
    expect(chat.completion.locator(".tokens .unknown")).to_have_count(0)
    assert violations(chat.page) == []

    place = next(i for i in range(1, len(shown)) if "\ufffd" not in "".join(shown[: i + 1]))
    tokens(chat).nth(place).click()
    card = chat.page.get_by_role("dialog")
    expect(card).to_contain_text("%")
    expect(card.get_by_text("chosen")).to_have_count(1)
    expect(card.get_by_role("button")).to_have_count(5)
    assert violations(chat.page) == []
    other = card.locator("button:enabled").filter(has_not_text="chosen").first
    chosen = str(other.get_attribute("title"))
    other.click()
    expect(chat.completion.get_by_role("group", name="Versions")).to_have_text("2/2")
    chat.done()
    assert bodies[2]["continue_final_message"] is True
    begun = bodies[2]["messages"][-1]["content"]
    prefix = "".join(shown[:place])
    assert begun.startswith(prefix)
    assert begun != prefix
    assert begun[len(prefix) :].replace(" ", "␣").replace("\n", "↵") in chosen
    branched = texts(tokens(chat))
    assert branched[:place] == shown[:place]
    assert "".join(branched).startswith(begun)
    # The prompt and the text before the token were computed for the first version.
    prompt = tiny.http.post("/tokenize", json={"messages": bodies[2]["messages"][:-1]}).json()["count"]
    number = chat.completion.locator(".usage b").inner_text().split()[0]
    assert int(number) >= prompt
    assert chat.complaints == []


def test_the_tokens_of_an_earlier_answer_are_computed_on_demand(short_answers: Chat) -> None:
    chat, bodies = short_answers, watch(short_answers)
    complete(chat, "one")
    content = chat.page.evaluate(
        """() => new Promise((done) => {
            indexedDB.open("llaisys").onsuccess = ({ target }) => {
                const all = target.result.transaction("messages").objectStore("messages").getAll();
                all.onsuccess = () => done(all.result.find(({ role }) => role === "assistant").content);
            };
        })"""
    )
    chat.completion.get_by_role("button", name="Token view").click()
    expect(tokens(chat)).to_have_count(0)
    expect(chat.text).to_be_visible()
    chat.button("Compute them").click()
    expect(tokens(chat)).not_to_have_count(0)
    assert "".join(texts(tokens(chat))) == content
    assert (bodies[1]["prompt_logprobs"], bodies[1]["max_tokens"]) == (5, 1)
    expect(chat.completion.locator(".tokens .unknown")).to_have_count(0)
    chat.completion.get_by_role("button", name="Token view").click()
    expect(tokens(chat)).to_have_count(0)
    expect(chat.text).to_be_visible()
    complete(chat, "two")
    assert "logprobs" not in bodies[2]
    assert chat.complaints == []


def test_the_keyboard_walks_the_tokens(short_answers: Chat) -> None:
    chat = short_answers
    complete(chat, "one")
    chat.completion.get_by_role("button", name="Token view").click()
    chat.button("Compute them").click()
    box = chat.completion.get_by_role("listbox")
    box.focus()
    for key, index in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("Home", 0), ("ArrowLeft", 0)):
        chat.page.keyboard.press(key)
        expect(tokens(chat).nth(index)).to_have_attribute("aria-selected", "true")
        expect(box.locator("[aria-selected=true]")).to_have_count(1)
    chat.page.keyboard.press("Enter")
    card = chat.page.get_by_role("dialog")
    expect(card).to_be_visible()
    chat.page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    expect(box).to_be_focused()


def test_a_growing_answer_adds_tokens_and_keeps_the_others(fed: Chat) -> None:
    """Tokens that are shown stay the same elements while more are generated."""
    fed.send("one")
    fed.feed("first")
    fed.end()
    fed.completion.get_by_role("button", name="Token view").click()
    fed.send("two")
    grow = """async (from) => {
        const frame = () => new Promise((done) => requestAnimationFrame(done));
        while (!window.feed) await frame();
        for (let i = from; i < from + 20; i++) feed.token(` t${i}`, -i / 10);
    }"""
    fed.page.evaluate(grow, 0)
    expect(tokens(fed)).to_have_count(20)
    shown = tokens(fed).element_handles()
    fed.page.evaluate(grow, 20)
    expect(tokens(fed)).to_have_count(40)
    assert all(token.evaluate("(element) => element.isConnected") for token in shown)
    assert texts(tokens(fed)) == [f" t{i}" for i in range(40)]
    fed.end()
    assert fed.complaints == []
