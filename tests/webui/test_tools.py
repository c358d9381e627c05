"""Structured output, tools and reasoning effort: what is sent, and tool calls that the user answers."""

from __future__ import annotations

import json

from playwright.sync_api import Locator, expect

from axe import violations
from chatpage import COMPLETIONS, Chat

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def json_fields(chat: Chat) -> Locator:
    """Open the settings with the fields for a schema and tools; return the dialog."""
    chat.page.keyboard.press("Control+,")
    dialog = chat.page.get_by_role("dialog", name="Settings")
    dialog.get_by_text("Structured output and tools").click()
    return dialog


def test_a_schema_bounds_the_completion(chat: Chat) -> None:
    """A schema that cannot be read is refused and not sent. The server follows the one that is."""
    field = json_fields(chat).get_by_label("JSON Schema of the answer")
    field.fill("[1]")
    expect(chat.page.get_by_text("This is not a JSON object")).to_be_visible()
    expect(field).to_have_attribute("aria-invalid", "true")
    field.fill('{"type": "object",\n "required" ["ok"]}')
    expect(chat.page.get_by_text("Line 2, column 13:")).to_be_visible()
    field.fill("")
    chat.page.get_by_role("button", name="Insert an example").first.click()
    expect(field).to_be_focused()
    assert json.loads(field.input_value())["type"] == "object"
    assert violations(chat.page) == []
    field.fill(json.dumps(SCHEMA))
    field.blur()
    expect(field).to_have_value(json.dumps(SCHEMA, indent=2))
    chat.page.keyboard.press("Escape")
    chat.reload()
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.send("Is it?")
    schema = {"name": "answer", "schema": SCHEMA}
    assert request.value.post_data_json["response_format"] == {"type": "json_schema", "json_schema": schema}
    chat.done()
    assert type(json.loads(chat.text.text_content() or "")["ok"]) is bool


def test_tool_calls_are_answered_by_hand(chat: Chat) -> None:
    """Each result follows the completion as a message of its own, and the model goes on."""
    field = json_fields(chat).get_by_label("Tools")
    field.fill('[{"parameters": {}}]')
    expect(chat.page.get_by_text("This is not a JSON list of functions")).to_be_visible()
    field.fill(json.dumps([WEATHER]))
    chat.page.keyboard.press("Escape")
    names = ("Oslo", "Rome")
    calls = [
        {"index": i, "id": f"c{i}", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        for i, city in enumerate(names)
    ]
    chat.complete_with({"tool_calls": calls}, finish="tool_calls")
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.send("Where is it warmer?")
    assert request.value.post_data_json["tools"] == [{"type": "function", "function": WEATHER}]
    expect(chat.completion.get_by_role("region", name="Tool call weather")).to_have_count(2)
    results = chat.completion.get_by_label("Result of weather")
    results.first.fill("3 °C")
    results.last.fill("21 °C")
    chat.complete_with("Rome.")
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.button("Send results").click()
    _, asked, *answered = request.value.post_data_json["messages"]
    assert [call["function"]["arguments"] for call in asked["tool_calls"]] == [
        '{"city": "Oslo"}',
        '{"city": "Rome"}',
    ]
    assert answered == [
        {"role": "tool", "content": "3 °C", "tool_call_id": "c0"},
        {"role": "tool", "content": "21 °C", "tool_call_id": "c1"},
    ]
    expect(chat.text).to_have_text("Rome.")
    expect(chat.button("Send results")).to_have_count(0)
    chat.reload()
    tools = chat.page.get_by_role("article", name="Tool")
    expect(tools.locator(".bubble")).to_have_text(["3 °C", "21 °C"])
    assert chat.complaints == []


def test_the_reasoning_shows_its_effort(chat: Chat) -> None:
    chat.page.keyboard.press("Control+,")
    chat.page.get_by_label("Reasoning effort").select_option("high")
    chat.page.keyboard.press("Escape")
    chat.complete_with({"reasoning_content": "hm"}, "yes")
    with chat.page.expect_request(COMPLETIONS) as request:
        chat.send("q")
    wanted = {"reasoning_effort": "high", "enable_thinking": True}
    assert request.value.post_data_json["chat_template_kwargs"] == wanted
    expect(chat.completion.locator("summary")).to_contain_text("effort: High")
