"""Settings: the fields sent, bounds and descriptions, presets, scopes, and the look of the web UI."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Locator, expect

from chatpage import COMPLETIONS, Chat
from llaisys.errors import RejectedError
from llaisys.sampling_params import SamplingParams
from serving import Server


def settings(chat: Chat) -> Locator:
    chat.page.keyboard.press("Control+,")
    return chat.page.get_by_role("dialog", name="Settings")


def sent_body(chat: Chat, message: str) -> dict[str, Any]:
    """Send a message; return the body of its request."""
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.send(message)
    chat.done()
    body: dict[str, Any] = request.value.post_data_json
    return body


def param(dialog: Locator, name: str) -> Locator:
    """Return the field of a sampling parameter."""
    return dialog.locator(f'[name="{name}"]')


def look(chat: Chat) -> Locator:
    """Open the settings of the page itself."""
    dialog = settings(chat)
    dialog.get_by_role("tab", name="Page").click()
    return dialog


VALUES: dict[str, tuple[str, Any]] = {
    "temperature": ("0.7", 0.7),
    "top_p": ("0.9", 0.9),
    "top_k": ("40", 40),
    "min_p": ("0.05", 0.05),
    "max_tokens": ("4", 4),
    "seed": ("7", 7),
    "stop": ("END\n\\n\\n", ["END", "\n\n"]),
    "repetition_penalty": ("1.1", 1.1),
    "presence_penalty": ("0.5", 0.5),
    "frequency_penalty": ("-0.5", -0.5),
    "typical_p": ("0.95", 0.95),
    "min_tokens": ("2", 2),
    "stop_token_ids": ("1, 2", [1, 2]),
    "logit_bias": ("5: 1.5\n7: -100", {"5": 1.5, "7": -100}),
}


def test_every_parameter_is_sent_and_served(chat: Chat) -> None:
    """The server accepts each of them."""
    dialog = settings(chat)
    dialog.get_by_text("More parameters").click()
    for name, (typed, _) in VALUES.items():
        field = param(dialog, name)
        field.fill(typed)
        field.blur()
    param(dialog, "ignore_eos").select_option("true")
    chat.page.keyboard.press("Escape")
    body = sent_body(chat, "Hello")
    for name, (_, value) in VALUES.items():
        assert body[name] == value, name
    assert body["ignore_eos"] is True
    assert "skip_special_tokens" not in body
    expect(chat.text).not_to_be_empty()
    expect(chat.page.get_by_role("alert")).to_have_count(0)


def test_each_field_is_described_and_validated(chat: Chat) -> None:
    dialog = settings(chat)
    field = param(dialog, "temperature")
    expect(field).to_have_accessible_description(re.compile("How freely words are drawn.*From 0 to 2"))
    field.fill("3")
    expect(field).to_have_attribute("aria-invalid", "true")
    field.fill("0.5")
    expect(field).to_have_attribute("aria-invalid", "false")
    dialog.get_by_role("button", name="Use default").click()
    expect(field).to_have_value("")
    chat.page.keyboard.press("Escape")
    chat.complete_with("yes")
    assert "temperature" not in sent_body(chat, "Hello")


@pytest.mark.parametrize(
    "name", ["temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_the_bounds_are_those_of_the_server(chat: Chat, name: str) -> None:
    """SamplingParams accepts the bounds that the web UI shows, and rejects values beyond them."""
    field = param(settings(chat), name)
    if not field.is_visible():
        chat.page.get_by_text("More parameters").click()
    low, high = _bounds(field)
    SamplingParams(**{name: low})
    SamplingParams(**{name: high})
    for outside in (low - 0.02, high + 0.02):
        with pytest.raises(RejectedError):
            SamplingParams(**{name: outside})
        field.fill(str(outside))
        expect(field).to_have_attribute("aria-invalid", "true")


def _bounds(field: Locator) -> tuple[float, float]:
    described = field.evaluate(
        "(input) => document.getElementById(input.getAttribute('aria-describedby')).textContent"
    )
    found = re.search(r"From (-?[\d.]+) to ([\d.]+)\.", described)
    assert found, described
    return float(found[1]), float(found[2])


def test_a_system_prompt_is_sent_first(chat: Chat) -> None:
    chat.complete_with("yes")
    field = settings(chat).get_by_label("System prompt")
    field.fill("Be brief.")
    field.blur()
    chat.page.keyboard.press("Escape")
    assert sent_body(chat, "Hello")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


def test_a_chat_may_have_its_own_settings(chat: Chat) -> None:
    chat.complete_with("yes")
    sent_body(chat, "mine")
    dialog = settings(chat)
    dialog.get_by_role("button", name="This chat").click()
    param(dialog, "temperature").fill("0.1")
    dialog.get_by_role("button", name="All chats", exact=True).click()
    param(dialog, "temperature").fill("0.9")
    chat.page.keyboard.press("Escape")
    assert sent_body(chat, "again")["temperature"] == 0.1
    chat.button("New chat").first.click()
    assert sent_body(chat, "other")["temperature"] == 0.9
    chat.reload()
    assert sent_body(chat, "after a reload")["temperature"] == 0.9
    chat.sessions.filter(has_text="mine").click()
    expect(chat.user_texts.first).to_have_text("mine")
    assert sent_body(chat, "still its own")["temperature"] == 0.1
    dialog = settings(chat)
    dialog.get_by_role("button", name="Follow all chats again").click()
    chat.page.keyboard.press("Escape")
    assert sent_body(chat, "no longer")["temperature"] == 0.9


def test_presets_are_chosen_and_saved(chat: Chat) -> None:
    chat.complete_with("yes")
    dialog = settings(chat)
    preset = dialog.get_by_role("combobox", name="Preset", exact=True)
    preset.select_option(label="Precise")
    expect(param(dialog, "temperature")).to_have_value("0")
    param(dialog, "top_k").fill("3")
    expect(preset.locator("option:checked")).to_have_text("Your own values")
    dialog.get_by_label("Name of a new preset").fill("mine")
    dialog.get_by_role("button", name="Save as preset", exact=True).click()
    expect(preset.locator("option:checked")).to_have_text("mine")
    dialog.get_by_role("button", name="Reset", exact=True).click()
    expect(preset.locator("option:checked")).to_have_text("Model's defaults")
    chat.reload()
    dialog = settings(chat)
    dialog.get_by_role("combobox", name="Preset", exact=True).select_option(label="mine")
    chat.page.keyboard.press("Escape")
    body = sent_body(chat, "Hello")
    assert (body["temperature"], body["top_k"]) == (0, 3)
    dialog = settings(chat)
    dialog.get_by_role("button", name="Delete preset mine").click()
    expect(dialog.get_by_role("combobox", name="Preset", exact=True).locator("option")).not_to_contain_text(
        ["mine"]
    )


def test_the_model_is_switched_for_one_chat(chat: Chat) -> None:
    chat.with_fields(max_tokens=3, ignore_eos=True)
    model = chat.page.get_by_label("Model", exact=True)
    expect(model).to_have_value("tiny")
    model.select_option("other")
    assert sent_body(chat, "Hello")["model"] == "other"
    expect(chat.completion.locator(".usage")).to_contain_text("other")
    chat.button("New chat").first.click()
    expect(model).to_have_value("tiny")


def test_the_web_ui_is_available_in_chinese(chat: Chat) -> None:
    dialog = look(chat)
    dialog.get_by_label("Language").select_option("zh")
    expect(chat.page.get_by_role("dialog", name="设置")).to_be_visible()
    assert chat.page.evaluate("document.documentElement.lang") == "zh-CN"
    chat.page.keyboard.press("Escape")
    chat.settle()
    chat.page.reload()
    expect(chat.page.get_by_role("textbox", name="消息")).to_be_visible()


def test_the_language_of_the_browser_is_the_default(chat: Chat) -> None:
    browser = chat.page.context.browser
    assert browser is not None
    context = browser.new_context(locale="zh-CN")
    page = context.new_page()
    page.goto(chat.url)
    expect(page.get_by_role("textbox", name="消息")).to_be_visible()
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_unless_one_is_chosen(chat: Chat, scheme: str) -> None:
    """The system's theme is the default; a chosen theme overrides it."""
    grounds = {"light": "rgb(255, 255, 255)", "dark": "rgb(23, 24, 28)"}
    other = "light" if scheme == "dark" else "dark"
    body = chat.page.locator("body")
    chat.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    expect(body).to_have_css("background-color", grounds[scheme])
    look(chat).get_by_label("Theme").select_option(other)
    expect(body).to_have_css("background-color", grounds[other])
    chat.settle()
    chat.page.reload()
    expect(body).to_have_css("background-color", grounds[other])


def test_the_font_size_is_kept(chat: Chat) -> None:
    look(chat).get_by_label("Font size").select_option("20")
    expect(chat.page.locator("html")).to_have_css("font-size", "20px")
    chat.settle()
    chat.page.reload()
    expect(chat.page.locator("html")).to_have_css("font-size", "20px")


def test_the_status_panel_shows_the_metrics_of_the_server(steady_chat: Chat) -> None:
    steady_chat.send("Hello")
    expect(steady_chat.text).not_to_be_empty()
    steady_chat.button("Server status").click()
    panel = steady_chat.page.get_by_role("complementary", name="Server status")
    expect(panel).to_contain_text("smollm2")
    expect(panel).to_contain_text("8,192")
    expect(panel.get_by_role("img", name="Running: 1")).to_be_visible()
    expect(panel.get_by_role("img", name=re.compile("Tokens generated per second: [1-9]"))).to_be_visible()
    expect(panel.locator("polyline").first).to_be_attached()
    steady_chat.button("Stop").click()
    expect(panel.get_by_role("img", name="Running: 0")).to_be_visible()
    panel.get_by_role("button", name="Close").click()
    expect(panel).to_have_count(0)


def test_settings_are_stored_as_plain_values(chat: Chat) -> None:
    param(settings(chat), "temperature").fill("0.3")
    kept = chat.page.evaluate(
        """() => new Promise((done) => {
            indexedDB.open("llaisys").onsuccess = ({ target }) => {
                const db = target.result;
                db.transaction("values").objectStore("values").get("settings").onsuccess = (event) => {
                    db.close();
                    done(JSON.stringify(event.target.result));
                };
            };
        })"""
    )
    assert json.loads(kept)["chat"]["params"] == {"temperature": 0.3}


def test_the_defaults_are_those_of_the_model(smollm2: Server, context: BrowserContext) -> None:
    """Sliders and placeholders show what the server samples with if a request sets nothing."""
    chat = Chat.open(context, smollm2.url)
    dialog = settings(chat)
    defaults = {"temperature": "0.2", "top_p": "0.9", "min_p": "0"}
    labels = ("Temperature", "Top-p", "Min-p")
    for label, (name, default) in zip(labels, defaults.items(), strict=True):
        expect(dialog.get_by_label(f"{label}, slider", exact=True)).to_have_value(default)
        expect(dialog.get_by_label(label, exact=True)).to_have_attribute("name", name)
        expect(param(dialog, name)).to_have_attribute("placeholder", f"default: {default}")
    field = param(dialog, "temperature")
    field.fill("0.7")
    expect(dialog.get_by_label("Temperature, slider", exact=True)).to_have_value("0.7")
    dialog.get_by_role("button", name="Use default").click()
    expect(dialog.get_by_label("Temperature, slider", exact=True)).to_have_value("0.2")
