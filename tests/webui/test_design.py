"""What is always in view: the model, the measure of the text, the usage line, and what is not the default."""

from __future__ import annotations

from playwright.sync_api import Locator, expect

from chatpage import Chat


def box(locator: Locator) -> dict[str, float]:
    found = locator.bounding_box()
    assert found is not None
    return {**found}


def test_the_model_picker_shows_format_and_context(chat: Chat) -> None:
    picker = chat.page.get_by_label("Model", exact=True)
    expect(picker.locator("option")).to_have_text(
        ["tiny · BF16 · 128k context", "other · BF16 · 128k context"]
    )
    assert box(picker)["x"] < box(chat.page.get_by_role("heading", level=1))["x"]


def test_a_chip_tells_of_own_settings_and_a_system_prompt(chat: Chat) -> None:
    header = chat.page.get_by_role("main")
    expect(header.get_by_role("button", name="System prompt")).to_have_count(0)
    chat.page.keyboard.press("Control+,")
    chat.page.get_by_label("System prompt").fill("Be brief.")
    chat.page.keyboard.press("Escape")
    header.get_by_role("button", name="System prompt").click()
    chat.button("This chat").click()
    chat.page.locator("[name=temperature]").fill("0.5")
    chat.page.keyboard.press("Escape")
    header.get_by_role("button", name="Own settings").click()
    expect(chat.page.get_by_role("dialog", name="Settings")).to_be_visible()


def test_the_usage_is_one_line_with_the_rest_in_a_popover(chat: Chat) -> None:
    chat.complete_with("yes")
    chat.send("q")
    chat.done()
    line = chat.completion.locator(".usage button")
    expect(line).to_contain_text("3 tokens")
    assert box(line)["height"] < 30
    details = chat.completion.locator(".usage dl")
    expect(details).to_be_hidden()
    line.click()
    expect(details).to_be_visible()
    expect(details).to_contain_text("7 prompt tokens, 5 cached")
    assert box(details)["y"] + box(details)["height"] <= box(line)["y"]
    chat.page.keyboard.press("Escape")
    expect(details).to_be_hidden()


def test_text_has_a_measure_and_actions_take_no_space(chat: Chat) -> None:
    """Messages are 16 pixels apart; their actions lie over the gap."""
    chat.complete_with("word " * 200)
    for _ in range(2):
        chat.send("q")
        chat.done()
    expect(chat.meter).to_be_visible()
    assert box(chat.text)["width"] == 42 * 16
    user, completion = chat.user_messages.last, chat.completions.first
    bubble, usage = box(user.locator(".bubble")), box(completion.locator(".usage"))
    assert 16 <= bubble["y"] - (usage["y"] + usage["height"]) <= 20
    before = box(user)
    user.hover()
    expect(user.locator(".actions")).to_have_css("opacity", "1")
    assert box(user) == before


def test_the_first_page_names_model_speed_and_privacy(chat: Chat) -> None:
    welcome = chat.page.get_by_role("main")
    host = chat.url.removeprefix("http://").rstrip("/")
    expect(welcome).to_contain_text(f"Your messages go to {host} only")
    expect(welcome).not_to_contain_text("tok/s")
    chat.complete_with("yes")
    chat.send("q")
    chat.done()
    chat.button("New chat").first.click()
    expect(welcome).to_contain_text("tok/s")
