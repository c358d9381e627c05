"""Calls of LiteLLM as a client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from call_list import KEY, LIGHT, MODEL, QUESTION, SCRIPTED, SERVER, URL, WEATHER, WEATHER_QUESTION, call


def lite(**more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": QUESTION}]
    where = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
    return {**where, "messages": said, "temperature": 0, "max_tokens": 48, **more}


@call("litellm", "completion")
def _() -> None:
    import litellm

    assert "Paris" in litellm.completion(**lite()).choices[0].message.content


@call("litellm", "completion, stream")
def _() -> None:
    import litellm

    chunks = litellm.completion(**lite(stream=True))
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@call("litellm", "acompletion, stream")
def _() -> None:
    import litellm

    async def read() -> str:
        chunks = await litellm.acompletion(**lite(stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert "Paris" in asyncio.run(read())


@call("litellm", "completion, response_format json_schema")
def _() -> None:
    import litellm

    form = {"type": "json_schema", "json_schema": {"name": "light", "schema": LIGHT}}
    answer = litellm.completion(**lite(response_format=form))
    assert json.loads(answer.choices[0].message.content)["on"] in (True, False)


@call("litellm", "completion, a named tool")
def _() -> None:
    import litellm

    tools = [{"type": "function", "function": {"name": "light", "parameters": LIGHT}}]
    choice = {"type": "function", "function": {"name": "light"}}
    (made,) = litellm.completion(**lite(tools=tools, tool_choice=choice)).choices[0].message.tool_calls
    assert json.loads(made.function.arguments)["on"] in (True, False)


@call("litellm", "text_completion")
def _() -> None:
    import litellm

    where = {"model": f"text-completion-openai/{MODEL}", "api_base": URL, "api_key": KEY}
    answer = litellm.text_completion(**where, prompt="The capital of France is", max_tokens=8)
    assert answer.choices[0].text.strip()


@call("litellm", "embedding")
def _() -> None:
    import litellm

    where = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
    assert len(litellm.embedding(**where, input=["a cat", "a dog"], encoding_format="float").data) == 2


@call("litellm", "a wrong key is litellm.AuthenticationError")
def _() -> None:
    import litellm

    litellm.suppress_debug_info = True
    try:
        litellm.completion(**lite(api_key="wrong"))
    except litellm.AuthenticationError:
        return
    raise AssertionError("no error")


def ends(kind: str) -> dict[str, Any]:
    """Return the arguments that select one of the protocols."""
    where = {"openai": (f"openai/{MODEL}", URL), "anthropic": (f"anthropic/{MODEL}", SERVER)}
    where |= {"ollama_chat": (f"ollama_chat/{MODEL}", SERVER)}
    model, address = where[kind]
    return {"model": model, "api_base": address, "api_key": KEY}


@call("litellm", "completion of anthropic/MODEL, whole and as a stream")
def _() -> None:
    import litellm

    assert "Paris" in litellm.completion(**lite(**ends("anthropic"))).choices[0].message.content
    chunks = litellm.completion(**lite(**ends("anthropic"), stream=True))
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@call("litellm", "completion of ollama_chat/MODEL, whole and as a stream")
def _() -> None:
    import litellm

    assert "Paris" in litellm.completion(**lite(**ends("ollama_chat"))).choices[0].message.content
    chunks = litellm.completion(**lite(**ends("ollama_chat"), stream=True))
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def weather(kind: str) -> str:
    """Hold a chat with two tool calls over a protocol of the scripted server; return its last text."""
    import litellm

    where = ends(kind)
    where["api_base"] = where["api_base"].replace(SERVER, SCRIPTED)
    function = {"name": "weather", "description": WEATHER["description"], "parameters": WEATHER}
    tools = [{"type": "function", "function": function}]
    said: list[Any] = [{"role": "user", "content": WEATHER_QUESTION}]
    turn = litellm.completion(**where, messages=said, tools=tools, max_tokens=128).choices[0].message
    said.append(turn.model_dump(exclude_none=True))
    for made in turn.tool_calls:
        city = json.loads(made.function.arguments)["city"]
        result = {"Paris": "weather: sunny", "Rome": "weather: rainy"}[city]
        said.append({"role": "tool", "tool_call_id": made.id, "content": result})
    chunks = litellm.completion(**where, messages=said, tools=tools, max_tokens=128, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@call("litellm", "tools of openai/, anthropic/ and ollama_chat/: two calls, their results, an answer")
def _() -> None:
    for kind in ("openai", "anthropic", "ollama_chat"):
        assert weather(kind) == "Paris is sunny, Rome is rainy.", kind


@call("litellm", "responses, whole and as a stream")
def _() -> None:
    import litellm

    settings = {**ends("openai"), "input": QUESTION, "temperature": 0, "max_output_tokens": 48}
    whole = litellm.responses(**settings)
    assert "Paris" in whole.output[0].content[0].text
    kinds = [event.type.value for event in litellm.responses(**settings, stream=True)]
    assert kinds[0] == "response.created", kinds
    assert kinds[-1] == "response.completed", kinds


@call("litellm", "anthropic.messages.acreate")
def _() -> None:
    import litellm

    said = [{"role": "user", "content": QUESTION}]
    made = litellm.anthropic.messages.acreate(
        **ends("anthropic"), messages=said, max_tokens=48, temperature=0
    )
    assert "Paris" in asyncio.run(made)["content"][0]["text"]
