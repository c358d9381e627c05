"""Calls of langchain-anthropic: text from SmolLM2, tools and thinking from the scripted server."""

from __future__ import annotations

import asyncio
from typing import Any

from call_list import KEY, LIGHT, MODEL, QUESTION, SCRIPTED, SERVER, THINK, WEATHER, WEATHER_QUESTION, call


def chat(url: str = SERVER, **more: Any) -> Any:
    from langchain_anthropic import ChatAnthropic

    settings = {"temperature": 0, "max_tokens": 48, **more}
    return ChatAnthropic(base_url=url, api_key=KEY, model=MODEL, max_retries=0, **settings)


def thinking() -> Any:
    budget = {"type": "enabled", "budget_tokens": 1024}
    return chat(SCRIPTED, max_tokens=2048, temperature=None, thinking=budget)


@call("langchain-anthropic", "ChatAnthropic.invoke")
def _() -> None:
    answer = chat().invoke([("system", "You are brief."), ("human", QUESTION)])
    assert "Paris" in answer.text, answer
    assert answer.response_metadata["stop_reason"] == "end_turn"
    assert answer.usage_metadata["input_tokens"] > answer.usage_metadata["output_tokens"] > 0


@call("langchain-anthropic", "ChatAnthropic.stream, with usage")
def _() -> None:
    chunks = list(chat().stream(QUESTION))
    assert len(chunks) > 2
    whole = sum(chunks[1:], chunks[0])
    assert "Paris" in whole.text
    assert whole.usage_metadata["output_tokens"] > 0


@call("langchain-anthropic", "ChatAnthropic.ainvoke, stop sequences")
def _() -> None:
    answer = asyncio.run(chat(stop_sequences=["Paris"]).ainvoke(QUESTION))
    assert "Paris" not in answer.text
    assert answer.response_metadata["stop_sequence"] == "Paris"


@call("langchain-anthropic", "ChatAnthropic.bind_tools, a tool that must be called")
def _() -> None:
    (made,) = chat().bind_tools([LIGHT], tool_choice="Light").invoke("Turn the light on.").tool_calls
    assert made["name"] == "Light"
    assert made["args"]["on"] in (True, False)


@call("langchain-anthropic", "ChatAnthropic.bind_tools: two calls, their results, an answer, each a stream")
def _() -> None:
    model = chat(SCRIPTED, max_tokens=128).bind_tools([WEATHER])
    said: list[Any] = [("human", WEATHER_QUESTION)]
    chunks = list(model.stream(said))
    turn = sum(chunks[1:], chunks[0])
    assert [made["args"] for made in turn.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}], turn
    said += [turn, *(result_of(made) for made in turn.tool_calls)]
    assert "".join(chunk.text for chunk in model.stream(said)) == "Paris is sunny, Rome is rainy."


def result_of(made: Any) -> Any:
    from langchain_core.messages import ToolMessage

    weather = {"Paris": "sunny", "Rome": "rainy"}[made["args"]["city"]]
    return ToolMessage(f"weather: {weather}", tool_call_id=made["id"])


@call("langchain-anthropic", "ChatAnthropic, thinking, and the next turn with its block")
def _() -> None:
    first = thinking().invoke(THINK)
    assert [block["type"] for block in first.content] == ["thinking", "text"], first
    assert (first.content[0]["thinking"], first.text) == ("Mass attracts mass.", "It pulls.")
    assert (
        thinking().invoke([("human", THINK), first, ("human", "Again?")]).text
        == "It pulled Mass attracts mass."
    )


@call("langchain-anthropic", "ChatAnthropic.stream, thinking")
def _() -> None:
    chunks = list(thinking().stream(THINK))
    whole = sum(chunks[1:], chunks[0])
    assert [block["type"] for block in whole.content] == ["thinking", "text"], whole
    assert (whole.content[0]["thinking"], whole.text) == ("Mass attracts mass.", "It pulls.")


@call("langchain-anthropic", "ChatAnthropic.with_structured_output, json_schema")
def _() -> None:
    made = chat().with_structured_output(LIGHT, method="json_schema").invoke("Turn the light on.")
    assert made["on"] in (True, False)


@call("langchain-anthropic", "ChatAnthropic.get_num_tokens_from_messages")
def _() -> None:
    from langchain_core.messages import HumanMessage

    assert chat().get_num_tokens_from_messages([HumanMessage(QUESTION)]) > 8


@call("langchain-anthropic", "a wrong key is anthropic.AuthenticationError")
def _() -> None:
    import anthropic
    from langchain_anthropic import ChatAnthropic

    try:
        ChatAnthropic(base_url=SERVER, api_key="wrong", model=MODEL, max_retries=0).invoke(QUESTION)
    except anthropic.AuthenticationError:
        return
    raise AssertionError("no error")
