"""Random bodies and texts: no body causes a 500, and a stream parses alike however it is split."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from fakes.service import FakeService, default_config
from llaisys.bench import http_client as bench
from llaisys.registry import ModelRegistry
from llaisys.server import request_schemas as models
from llaisys.server.app import create_app
from llaisys.server.http_errors import ANTHROPIC_PATH
from llaisys.server.messages.schemas import CountTokensRequest, MessagesRequest
from llaisys.server.responses.schemas import ResponsesRequest
from llaisys.server.state import ServerState
from llaisys.server.stream_writer import DATA_EVENTS, StreamWriter
from sse import events

MODELS = {
    "/v1/chat/completions": models.ChatCompletionRequest,
    "/v1/completions": models.CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": models.EmbeddingRequest,
    "/v1/rerank": models.RerankRequest,
    "/score": models.ScoreRequest,
    "/tokenize": models.TokenizeRequest,
    "/detokenize": models.DetokenizeRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(
        ["", "tiny", "function", "user", "json_schema", "\ud800", 0, 1, -1, 2**31, 2**63, 1e308]
    )
)
NAMES = st.sampled_from(
    ["type", "role", "content", "function", "name", "json_schema", "schema", "json", "text", "input", ""]
)
VALUES = st.recursive(
    SCALARS, lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=3), max_leaves=6
)


@cache
def app_for(path: str) -> ASGIApp:  # noqa: ARG001 -- one per test, and so per event loop
    """Return the application on a scripted engine. Creating it takes longer than one example."""
    return create_app(ServerState(default_config(), models=ModelRegistry([FakeService()])), 8000)  # type: ignore[list-item]


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Generate objects of the route's fields with any values, many based on a valid body; or any value."""
    base = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "tokens": [1]}
    served = MODELS[path].model_fields
    good = {name: value for name, value in base.items() if name in served}
    good = {name: good[name] for name in list(good)[:1]}
    if MODELS[path] is MessagesRequest:
        good["max_tokens"] = 8
    random = st.dictionaries(st.sampled_from(sorted(served)), VALUES, max_size=4)
    return random | random.map(lambda drawn: {**drawn, **good}) | VALUES


@pytest.mark.parametrize("path", MODELS)
@settings(max_examples=150, derandomize=True)
@given(data=st.data())
async def test_no_body_causes_a_server_error(path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path))
    transport = httpx.ASGITransport(app_for(path), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
        headers = {"content-type": "application/json"}
        response = await http.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert error["type" if path.startswith(ANTHROPIC_PATH) else "code"]


@settings(derandomize=True)
@given(
    texts=st.lists(
        st.text() | st.sampled_from(["\n\n", "\r\n", "data: [DONE]", "\u2028", "天🦙"]), max_size=6
    ),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=12),
)
async def test_a_stream_parses_alike_however_it_is_split(texts: list[str], cuts: list[int]) -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": text}]} for text in texts]
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": len(texts)}}
    writer = StreamWriter(send, DATA_EVENTS, {}, [], lambda: None, 30.0)
    for chunk in chunks:
        await writer.frames([chunk])
    await writer.finish([usage])
    raw = b"".join(sent)
    assert events(raw) == [*chunks, usage, "[DONE]"]

    record = bench.RequestRecord(due_s=0.0)
    stream = bench._Stream(record)
    at = turn = 0
    while at < len(raw):
        size = cuts[turn % len(cuts)]
        stream.feed(raw[at : at + size], float(turn))
        at, turn = at + size, turn + 1
    stream.close()
    assert record.text == "".join(texts)
    assert record.output_tokens == len(texts)
