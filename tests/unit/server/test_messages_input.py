"""The chat request that a request of Messages becomes."""

from __future__ import annotations

from typing import Any

import pytest

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.server.messages.input import chat_request
from llaisys.server.messages.schemas import MessagesRequest
from llaisys.server.request_schemas import MESSAGES_MAX, ChatCompletionRequest

LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"
USER = {"role": "user", "content": "Hi"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED = [USER, {"role": "assistant", "content": [USE]}]


def translated(*messages: dict[str, Any], drops: bool = True, **fields: Any) -> ChatCompletionRequest:
    body = MessagesRequest(max_tokens=8, messages=list(messages) or [USER], **fields)
    return chat_request(body, drops_attribution=drops)


def text(*texts: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each, **more} for each in texts]


def result(content: Any = "3", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def test_system_is_text_or_blocks() -> None:
    head = {"role": "system", "content": "Be\nkind"}
    assert translated(system="Be\nkind").messages == [head, USER]
    blocks = text("Be", "kind", cache_control={"type": "ephemeral"})
    assert translated(system=blocks).messages == [head, USER]
    assert translated(system="").messages == translated(system=[]).messages == [USER]


@pytest.mark.parametrize("as_blocks", [False, True])
def test_the_attribution_line_does_not_reach_the_prompt(as_blocks: bool) -> None:
    """`cch` is different in each request, so with the line no prefix of the prompt would be the same."""
    heads = []
    for cch in ("36ee5", "0aaa9"):
        line = LINE.format(cch)
        system = text(line, "You are an agent.") if as_blocks else f"{line}\nYou are an agent."
        heads.append(translated(system=system).messages[0])
        kept = translated(system=system, drops=False).messages[0]["content"]
        assert kept == f"{line}\nYou are an agent."
    assert heads == [{"role": "system", "content": "You are an agent."}] * 2


def test_only_the_first_line_is_dropped() -> None:
    line = LINE.format("1")
    assert translated(system=line).messages == [USER]
    later = f"You are an agent.\n{line}"
    assert translated(system=later).messages[0]["content"] == later
    assert translated(system=text("A", line)).messages[0]["content"] == f"A\n{line}"


def test_turns_become_messages() -> None:
    chat = translated(
        {"role": "user", "content": text("a", "b")},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                *text("c"),
                USE,
            ],
        },
        {"role": "user", "content": [result(text("3", "4")), *text("d")]},
    )
    assert chat.messages == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": "3\n4"},
        {"role": "user", "content": "d"},
    ]
    assert not chat.continue_final_message


def test_adjacent_turns_of_one_role_are_one_message() -> None:
    chat = translated(
        USER, USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
    )
    assert chat.messages == [{"role": "user", "content": "Hi\nHi"}, {"role": "assistant", "content": "a\nb"}]
    assert chat.continue_final_message


def test_a_call_without_text_has_no_content() -> None:
    messages = translated(*ASKED, {"role": "user", "content": [result()]}).messages
    assert messages[1] == {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("given", "content"),
    [("", ""), (None, ""), ([], ""), ("x", "x"), (text("x", "y"), "x\ny")],
)
def test_the_content_of_a_tool_result(given: Any, content: str) -> None:
    for is_error, want in ((False, content), (True, f"Error: {content}")):
        turn = {"role": "user", "content": [result(given, is_error=is_error)]}
        assert translated(*ASKED, turn).messages[-1]["content"] == want


def test_a_system_message_within_the_conversation_is_marked_text_of_the_user() -> None:
    first, later = {"role": "system", "content": "S"}, {"role": "system", "content": text("T")}
    assert translated(first, USER, later, system="R").messages == [
        {"role": "system", "content": "R\nS"},
        {"role": "user", "content": "Hi\n<system-reminder>\nT\n</system-reminder>"},
    ]


def test_a_message_may_have_more_results_than_a_chat_has_messages() -> None:
    uses = [{**USE, "id": f"t{i}"} for i in range(MESSAGES_MAX + 1)]
    results = [{**result(), "tool_use_id": f"t{i}"} for i in range(MESSAGES_MAX + 1)]
    chat = translated(USER, {"role": "assistant", "content": uses}, {"role": "user", "content": results})
    assert len(chat.messages) == MESSAGES_MAX + 3


def test_sampling_fields_keep_their_values() -> None:
    fields = {"model": "m", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stream": True, "seed": 7}
    more = {"min_p": 0.1, "repetition_penalty": 1.1, "priority": 1, "cache_salt": "s", "session_id": "n"}
    chat = translated(stop_sequences=["END"], **fields, **more)
    assert {name: getattr(chat, name) for name in (*fields, *more)} == {**fields, **more}
    assert (chat.max_tokens, chat.stop) == (8, ["END"])
    assert chat.n is chat.logprobs is chat.response_format is None


def test_tools_and_choices() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"name": "add", "description": "Add", "input_schema": schema, "cache_control": {}, "strict": True}
    function = {"name": "add", "description": "Add", "parameters": schema}
    chosen = {"type": "function", "function": {"name": "add"}}
    for choice, want in (
        (None, (None, None)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "add"}, (chosen, True)),
        ({"type": "none"}, ("none", True)),
    ):
        chat = translated(tools=[tool, {**tool, "type": "custom"}], tool_choice=choice)
        assert chat.tools == [{"type": "function", "function": function}] * 2
        assert (chat.tool_choice, chat.parallel_tool_calls) == want


def test_thinking_sets_the_switches_of_templates() -> None:
    for kind, on in (("enabled", True), ("adaptive", True), ("between_tools", True), ("disabled", False)):
        switches = translated(thinking={"type": kind, "budget_tokens": 2048}).chat_template_kwargs
        assert switches == {"enable_thinking": on, "thinking": on}
    assert translated().chat_template_kwargs == {}
    chosen = translated(thinking={"type": "enabled"}, chat_template_kwargs={"thinking": False, "x": 1})
    assert chosen.chat_template_kwargs == {"enable_thinking": True, "thinking": False, "x": 1}


def test_an_output_format_is_a_schema() -> None:
    schema = {"type": "object"}
    format = {"type": "json_schema", "schema": schema}
    assert translated(output_config={"format": format, "effort": "high"}).guided_json == schema
    assert translated(output_config={"effort": "high"}).guided_json is None


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "container_upload"])
def test_blocks_that_are_not_text_are_refused_by_name(kind: str) -> None:
    block = {"type": kind, "source": {"type": "base64", "data": "x"}}
    for messages, where in (
        ([{"role": "user", "content": [*text("a"), block]}], r"messages\[0\]\.content\[1\]"),
        ([USER, {"role": "assistant", "content": [block]}], r"messages\[1\]\.content\[0\]"),
        ([*ASKED, {"role": "user", "content": [result([block])]}], r"messages\[2\]\.content\[0\]\.content"),
    ):
        with pytest.raises(UnsupportedError, match=f"{where}.* is of type '{kind}'"):
            translated(*messages)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (ASKED, "messages[1]"),
        ([USER, {"role": "assistant", "content": ""}], "messages[1]"),
        ([USER, {"role": "assistant", "content": []}], "messages[1]"),
        ([{"role": "user", "content": [result()]}], "messages[0].content[0].tool_use_id"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([USER, {"role": "assistant", "content": [{**USE, "id": 5}]}], "messages[1].content[0].id"),
        ([USER, {"role": "assistant", "content": [{**USE, "input": "x"}]}], "messages[1].content[0].input"),
        ([USER, {"role": "assistant", "content": [{"type": "thinking"}]}], "messages[1].content[0].thinking"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
    ],
)
def test_an_invalid_turn_is_named(messages: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(RejectedError) as caught:
        translated(*messages)
    assert caught.value.param == field
    assert str(caught.value).startswith(field)
