"""LiteLLM's proxy in front of the servers, used by the clients of OpenAI and Anthropic.

Each name of the proxy is one protocol between it and the server.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from call_list import FOLDER, KEY, MODEL, QUESTION, SCRIPTED, SERVER, WEATHER, WEATHER_QUESTION, call

ROUTES = {"by-chat": ("openai", "/v1"), "by-messages": ("anthropic", ""), "by-ollama": ("ollama_chat", "")}
START_S = 180


@cache
def proxy() -> str:
    """Start the proxy; return its address."""
    import httpx

    models = [
        {
            "model_name": name + suffix,
            "litellm_params": {
                "model": f"{kind}/{MODEL}",
                "api_base": server + path,
                "api_key": "os.environ/LLAISYS_API_KEY",
            },
        }
        for name, (kind, path) in ROUTES.items()
        for suffix, server in (("", SERVER), ("-scripted", SCRIPTED))
    ]
    config = FOLDER / "litellm.json"  # JSON is YAML
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}), "utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    log = (FOLDER / "litellm.log").open("w", encoding="utf-8")
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "LLAISYS_API_KEY": KEY}
    )
    atexit.register(process.kill)
    url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while time.monotonic() < end_s:
        assert process.poll() is None, (FOLDER / "litellm.log").read_text("utf-8")[-2000:]
        try:
            if httpx.get(f"{url}/health/liveliness").status_code == 200:
                return url
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError("the proxy is not ready")


def openai_client() -> Any:
    import openai

    return openai.OpenAI(base_url=f"{proxy()}/v1", api_key=KEY, max_retries=0)


def anthropic_client() -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=proxy(), api_key=KEY, max_retries=0)


SAID: Any = [{"role": "user", "content": QUESTION}]


@call("litellm", "proxy: the openai client's chats by each protocol, whole and as a stream")
def _() -> None:
    for name in ROUTES:
        settings = {"model": name, "messages": SAID, "temperature": 0, "max_tokens": 48}
        whole = openai_client().chat.completions.create(**settings)
        assert "Paris" in whole.choices[0].message.content, name
        chunks = list(openai_client().chat.completions.create(**settings, stream=True))
        assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), name


@call("litellm", "proxy: the anthropic client's messages by each protocol, whole and as a stream")
def _() -> None:
    for name in ROUTES:
        settings = {"model": name, "messages": SAID, "max_tokens": 48, "extra_body": {"temperature": 0}}
        assert "Paris" in anthropic_client().messages.create(**settings).content[0].text, name
        with anthropic_client().messages.stream(**settings) as stream:
            assert "Paris" in stream.get_final_text(), name


@call("litellm", "proxy: the openai client's responses, whole and as a stream")
def _() -> None:
    settings = {"model": "by-chat", "input": QUESTION, "temperature": 0, "max_output_tokens": 48}
    assert "Paris" in openai_client().responses.create(**settings).output_text
    events = list(openai_client().responses.create(**settings, stream=True))
    assert events[-1].type == "response.completed"


@call("litellm", "proxy: the anthropic client's tools by messages and by chat: two calls, results, an answer")
def _() -> None:
    tool = {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER}
    for name in ("by-messages-scripted", "by-chat-scripted"):
        said: list[Any] = [{"role": "user", "content": WEATHER_QUESTION}]
        settings = {"model": name, "max_tokens": 128, "tools": [tool]}
        with anthropic_client().messages.stream(**settings, messages=said) as stream:
            turn = stream.get_final_message()
        calls = [block for block in turn.content if block.type == "tool_use"]
        assert [made.input for made in calls] == [{"city": "Paris"}, {"city": "Rome"}], (name, turn)
        weather = ("weather: sunny", "weather: rainy")
        results = [
            {"type": "tool_result", "tool_use_id": made.id, "content": text}
            for made, text in zip(calls, weather, strict=True)
        ]
        said += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": results}]
        answer = anthropic_client().messages.create(**settings, messages=said)
        assert answer.content[0].text == "Paris is sunny, Rome is rainy.", name
