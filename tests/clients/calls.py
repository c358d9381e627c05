"""Typical calls of langchain-openai, litellm and llm, against the server of the arguments.

Runs in .venv-clients, which has no LLAISYS. Prints one line per call; exits with 1 if one failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

URL, KEY, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
MODEL = "smollm2"
QUESTION = "What is the capital of France? One word."
LIGHT = {
    "title": "Light",
    "description": "Turn the light on or off.",
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
# Prices from the package, not from the network; no hints on standard output.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
CALLS: list[tuple[str, str, Callable[[], Any]]] = []


def call(library: str, name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CALLS.append((library, name, function))
        return function

    return add


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


def llm(*words: str, said: str | None = None) -> str:
    """Run the command line tool with this server in its list of models."""
    entry = f"- model_id: here\n  model_name: {MODEL}\n  api_base: {URL}\n  api_key_name: here\n"
    entry += "  supports_schema: true\n"
    (FOLDER / "extra-openai-models.yaml").write_text(entry, "utf-8")
    (FOLDER / "keys.json").write_text(json.dumps({"here": KEY}), "utf-8")
    env = {**os.environ, "LLM_USER_PATH": str(FOLDER)}
    command = [str(Path(sys.executable).with_name("llm")), *words]
    done = subprocess.run(command, env=env, input=said, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@call("llm", "llm -m MODEL PROMPT (a stream)")
def _() -> None:
    assert "Paris" in llm("-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "48", QUESTION)


@call("llm", "llm --no-stream -s SYSTEM, prompt from stdin")
def _() -> None:
    words = ("-m", "here", "--no-stream", "-s", "You are brief.", "-o", "temperature", "0")
    assert "Paris" in llm(*words, "-o", "max_tokens", "48", said=QUESTION)


@call("llm", "llm --schema")
def _() -> None:
    words = ("-m", "here", "--no-stream", "--schema", json.dumps(LIGHT), "-o", "max_tokens", "48")
    assert json.loads(llm(*words, "Turn the light on."))["on"] in (True, False)


@call("llm", "llm -c (goes on with the last chat)")
def _() -> None:
    assert llm("-c", "-o", "max_tokens", "16", "And of Italy?").strip()


def main() -> int:
    libraries = dict.fromkeys(library for library, _, _ in CALLS)
    print("# make test-clients:", ", ".join(f"{name} {version(name)}" for name in libraries))
    n_failed = 0
    for library, name, function in CALLS:
        try:
            function()
        except Exception as e:  # noqa: BLE001 -- every call gets its line
            n_failed += 1
            print(f"FAILED  {library:17} {name}: {type(e).__name__}: {str(e)[:200]}", flush=True)
            traceback.print_exc()
        else:
            print(f"ok      {library:17} {name}", flush=True)
    print(f"{len(CALLS) - n_failed} of {len(CALLS)} calls")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
