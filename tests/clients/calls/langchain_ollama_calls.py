"""Calls of langchain-ollama: text from SmolLM2, tools and thinking from the scripted server."""

from __future__ import annotations

import asyncio
from typing import Any

from call_list import KEY, LIGHT, MODEL, QUESTION, SCRIPTED, SERVER, THINK, WEATHER, WEATHER_QUESTION, call
from langchain_anthropic_calls import result_of

HEADERS = {"headers": {"authorization": f"Bearer {KEY}"}}


def chat(url: str = SERVER, **more: Any) -> Any:
    from langchain_ollama import ChatOllama

    settings = {"temperature": 0, "num_predict": 48, **more}
    return ChatOllama(base_url=url, model=MODEL, client_kwargs=HEADERS, **settings)


@call("langchain-ollama", "ChatOllama.invoke, after the check that the model exists")
def _() -> None:
    answer = chat(validate_model_on_init=True).invoke([("system", "You are brief."), ("human", QUESTION)])
    assert "Paris" in answer.content, answer
    assert answer.usage_metadata["input_tokens"] > answer.usage_metadata["output_tokens"] > 0


@call("langchain-ollama", "ChatOllama.stream, with usage")
def _() -> None:
    chunks = list(chat().stream(QUESTION))
    assert len(chunks) > 2
    whole = sum(chunks[1:], chunks[0])
    assert "Paris" in whole.content
    assert whole.response_metadata["done_reason"] == "stop"
    assert whole.usage_metadata["output_tokens"] > 0


@call("langchain-ollama", "ChatOllama.ainvoke")
def _() -> None:
    assert "Paris" in asyncio.run(chat().ainvoke(QUESTION)).content


@call("langchain-ollama", "ChatOllama.bind_tools: two calls, their results, an answer")
def _() -> None:
    model = chat(SCRIPTED, num_predict=128).bind_tools([WEATHER])
    said: list[Any] = [("human", WEATHER_QUESTION)]
    turn = model.invoke(said)
    assert [made["args"] for made in turn.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}], turn
    said += [turn, *(result_of(made) for made in turn.tool_calls)]
    assert "".join(chunk.content for chunk in model.stream(said)) == "Paris is sunny, Rome is rainy."


@call("langchain-ollama", "ChatOllama.with_structured_output, json_schema")
def _() -> None:
    made = chat().with_structured_output(LIGHT, method="json_schema").invoke("Turn the light on.")
    assert made["on"] in (True, False)


@call("langchain-ollama", "ChatOllama(reasoning=True), invoke and stream")
def _() -> None:
    model = chat(SCRIPTED, reasoning=True)
    answer, chunks = model.invoke(THINK), list(model.stream(THINK))
    for each in (answer, sum(chunks[1:], chunks[0])):
        assert each.content == "It pulls.", each
        assert each.additional_kwargs["reasoning_content"] == "Mass attracts mass."


@call("langchain-ollama", "OllamaLLM.invoke (generate)")
def _() -> None:
    from langchain_ollama import OllamaLLM

    model = OllamaLLM(base_url=SERVER, model=MODEL, client_kwargs=HEADERS, temperature=0, num_predict=48)
    assert "Paris" in model.invoke(QUESTION)


@call("langchain-ollama", "OllamaEmbeddings.embed_documents")
def _() -> None:
    from langchain_ollama import OllamaEmbeddings

    model = OllamaEmbeddings(base_url=SERVER, model=MODEL, client_kwargs=HEADERS)
    one, two = model.embed_documents(["a cat", "a dog"])
    assert len(one) == len(two) > 0
    assert one != two


@call("langchain-ollama", "a model that is not served is ollama.ResponseError, 404")
def _() -> None:
    import ollama
    from langchain_ollama import ChatOllama

    try:
        ChatOllama(base_url=SERVER, model="absent", client_kwargs=HEADERS).invoke(QUESTION)
    except ollama.ResponseError as e:
        status = e.status_code
    else:
        status = 200
    assert status == 404
