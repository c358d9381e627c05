"""The official Node client against a server: tests/clients/node/client.mjs calls, this module checks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from serving import END_S, Server, long_model, serving

FOLDER = Path(__file__).parents[1] / "clients" / "node"
KEY = "sesame"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("node")
    flags = ("--num-kv-cells", "65536", "--dtype", "float32", "--tool-call-parser", "hermes")
    with serving(folder, str(long_model(folder)), *flags, key=KEY) as made:
        yield made


@pytest.fixture(scope="module")
def calls(server: Server) -> dict[str, dict[str, Any]]:
    """Return the results of the program by call."""
    command = ["node", str(FOLDER / "client.mjs"), f"{server.url}/v1", KEY]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=END_S)
    assert done.returncode == 0, done.stderr + done.stdout
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["call"]: each for each in seen}


def test_the_served_model_is_listed(calls: dict[str, dict[str, Any]]) -> None:
    assert calls["models.list"]["ids"] == ["tiny"]
    assert calls["models.retrieve"]["id"] == "tiny"


def test_completions_equal_the_python_clients(server: Server, calls: dict[str, dict[str, Any]]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        chat = client.chat.completions.create(
            model="tiny", temperature=0, max_tokens=12, messages=[{"role": "user", "content": "Hello there"}]
        )
    said = chat.choices[0].message.content
    assert said
    for call in ("chat", "chat stream", "chat stream helper"):
        assert calls[call]["content"] == said
    for part in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert calls["chat"]["usage"][part] == calls["chat stream"]["usage"][part] > 0


def test_a_streamed_completion_equals_the_whole_one(calls: dict[str, dict[str, Any]]) -> None:
    assert all(calls["completions"]["texts"])
    assert calls["completions"]["texts"] == calls["completions stream"]["texts"]


def test_tool_calls_and_structured_outputs_are_valid_json(calls: dict[str, dict[str, Any]]) -> None:
    (call,) = calls["tools"]["calls"]
    assert call["name"] == "set_light"
    assert json.loads(call["arguments"])["on"] in (True, False)
    assert calls["tools"]["finish_reason"] == "tool_calls"
    assert json.loads(calls["structured"]["content"])["light"] in ("on", "off")


def test_embeddings_have_length_one_and_a_base64_default(calls: dict[str, dict[str, Any]]) -> None:
    vectors = np.array(calls["embeddings float"]["vectors"])
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6
    # The default asks for base64 of float32, which the client decodes.
    assert np.array_equal(vectors, np.array(calls["embeddings default"]["vectors"]))


def test_an_abort_ends_the_request(server: Server, calls: dict[str, dict[str, Any]]) -> None:
    assert calls["abort"]["object"] == "text_completion"
    assert calls["abort by signal"]["error"] == "APIUserAbortError"
    server.until("vllm:num_requests_running", 0)
    server.until("vllm:request_success_total", 2, finished_reason="abort")


@pytest.mark.parametrize(
    ("call", "error", "status", "code", "param"),
    [
        ("bad request", "BadRequestError", 400, "invalid_value", "temperature"),
        ("unknown model", "NotFoundError", 404, "model_not_found", "model"),
        ("wrong key", "AuthenticationError", 401, "invalid_api_key", None),
    ],
)
def test_errors_have_the_classes_of_the_client(
    calls: dict[str, dict[str, Any]], call: str, error: str, status: int, code: str, param: str | None
) -> None:
    seen = calls[call]
    assert (seen["error"], seen["status"], seen["code"], seen["param"]) == (error, status, code, param)
    assert seen["type"] == "invalid_request_error"
