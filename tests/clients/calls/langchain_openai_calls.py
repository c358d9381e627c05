"""Calls of langchain-openai."""

from __future__ import annotations

import asyncio
from typing import Any

from call_list import KEY, LIGHT, MODEL, QUESTION, URL, call


def langchain(**more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=48, **more)


@call("langchain-openai", "ChatOpenAI.invoke")
def _() -> None:
    answer = langchain().invoke(QUESTION)
    assert "Paris" in answer.content, answer
    assert answer.usage_metadata["total_tokens"] > 0


@call("langchain-openai", "ChatOpenAI.stream, with usage")
def _() -> None:
    chunks = list(langchain(stream_usage=True).stream(QUESTION))
    assert "Paris" in "".join(chunk.content for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)


@call("langchain-openai", "ChatOpenAI.batch of three")
def _() -> None:
    assert len({answer.content for answer in langchain().batch([QUESTION] * 3)}) == 1


@call("langchain-openai", "ChatOpenAI.ainvoke")
def _() -> None:
    assert "Paris" in asyncio.run(langchain().ainvoke(QUESTION)).content


@call("langchain-openai", "ChatOpenAI.with_structured_output, json_schema")
def _() -> None:
    made = langchain().with_structured_output(LIGHT, method="json_schema").invoke("Turn the light on.")
    assert made["on"] in (True, False)


@call("langchain-openai", "ChatOpenAI.bind_tools, a tool that must be called")
def _() -> None:
    answer = langchain().bind_tools([LIGHT], tool_choice="Light").invoke("Turn the light on.")
    (made,) = answer.tool_calls
    assert made["name"] == "Light"
    assert made["args"]["on"] in (True, False)


@call("langchain-openai", "OpenAI.invoke (completions)")
def _() -> None:
    from langchain_openai import OpenAI

    model = OpenAI(base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=8)
    assert model.invoke("The capital of France is").strip()


@call("langchain-openai", "OpenAIEmbeddings.embed_documents, texts as they are")
def _() -> None:
    from langchain_openai import OpenAIEmbeddings

    model = OpenAIEmbeddings(base_url=URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    one, two = model.embed_documents(["a cat", "a dog"])
    assert len(one) == len(two) > 0


@call("langchain-openai", "a wrong field is openai.BadRequestError")
def _() -> None:
    import openai

    try:
        langchain(top_p=3).invoke(QUESTION)
    except openai.BadRequestError:
        return
    raise AssertionError("no error")
