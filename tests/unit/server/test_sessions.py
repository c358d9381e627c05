"""/v1/sessions and `session_id` over the real service on the fake core."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app, create_routes
from llaisys.server.state import ServerState

KEYS = ("one", "two")
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in KEYS)
PROMPT = [*range(1, 31)]
# Five output tokens; the last one has no K and V yet.
N_TOKENS = len(PROMPT) + 4
BAD_NAMES = ("..", "../up", "a/b", "%2e%2e%2fup", ".hidden", "-x", "a" * 65, "a b", "é", "a%00")

pytestmark = pytest.mark.usefixtures("fake_model")


@pytest.fixture
async def http(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    (store := tmp_path / "store").mkdir()
    settings = {"session_store": store, **getattr(request, "param", {})}
    service = await AsyncLLM.start(Config(num_kv_cells=512, **settings))
    app = create_app(ServerState(Config(api_key=KEYS), models=ModelRegistry([service])), 8000)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:8000", headers=ONE
    ) as client:
        yield client
    await service.close()


async def generate(http: httpx.AsyncClient, session: str, prompt: Any = None, **more: Any) -> httpx.Response:
    body = {"prompt": prompt or PROMPT, "max_tokens": 5, "session_id": session, "temperature": 0}
    body |= {"cache_salt": more.pop("cache_salt")} if "cache_salt" in more else {}
    return await http.post("/v1/completions", json=body, **more)


def shown(name: str, n: int) -> dict[str, Any]:
    return {
        "id": name, "object": "session", "num_tokens": n, "num_cached_tokens": n, "num_pinned_tokens": n,
        "is_restoring": False,
    }  # fmt: skip


def error(response: httpx.Response) -> tuple[int, str, str | None]:
    fields = response.json()["error"]
    assert set(fields) == {"message", "type", "param", "code"}
    return response.status_code, fields["code"], fields["param"]


async def test_create_list_trim_and_delete_a_session(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/sessions")).json() == {"object": "list", "data": []}
    assert (await http.post("/v1/sessions", json={"session_id": "empty"})).json() == shown("empty", 0)
    assert (await generate(http, "chat")).status_code == 200
    assert (await http.get("/v1/sessions/chat")).json() == shown("chat", N_TOKENS)
    fork = {"session_id": "branch", "n_tokens": 12}
    assert (await http.post("/v1/sessions/chat/fork", json=fork)).json() == shown("branch", 12)
    whole = await http.post("/v1/sessions/chat/fork", json={"session_id": "twin"})
    assert whole.json() == shown("twin", N_TOKENS)
    trimmed = await http.post("/v1/sessions/branch/trim", json={"n_tokens": 3})
    assert trimmed.json() == shown("branch", 3)
    listed = (await http.get("/v1/sessions")).json()["data"]
    assert [each["id"] for each in listed] == ["branch", "chat", "empty", "twin"]
    gone = await http.delete("/v1/sessions/twin")
    assert gone.json() == {"id": "twin", "object": "session.deleted", "deleted": True}
    assert error(await http.get("/v1/sessions/twin")) == (404, "not_found", "session_id")


async def test_a_saved_session_is_restored(http: httpx.AsyncClient, tmp_path: Path) -> None:
    first = (await generate(http, "chat")).json()
    saved = await http.post("/v1/sessions/chat/save", json={"file": "monday"})
    assert saved.json() == shown("chat", N_TOKENS)
    (file,) = (tmp_path / "store").rglob("*.kv")
    assert file.name == "monday.kv"
    assert (await http.delete("/v1/sessions/chat")).status_code == 200
    back = await http.post("/v1/sessions/again/restore", json={"file": "monday"})
    assert back.json() == shown("again", N_TOKENS)
    again = (await generate(http, "again")).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1
    lost = await http.post("/v1/sessions/x/restore", json={"file": "tuesday"})
    assert error(lost) == (404, "not_found", "file")


async def test_the_chat_endpoint_accepts_a_session_id(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "session_id": "chat"}
    n = (await http.post("/v1/chat/completions", json=body)).json()["usage"]["total_tokens"]
    assert (await http.get("/v1/sessions/chat")).json() == shown("chat", n - 1)


@pytest.mark.parametrize("sharing", ["per-key", "all"])
async def test_cached_prefixes_are_shared_by_requests_of_one_key(sharing: str) -> None:
    """Otherwise `cached_tokens` would tell a key how much of another key's prompt it has guessed."""
    service = await AsyncLLM.start(Config(num_kv_cells=512), n_clients=2)
    config = Config(api_key=KEYS, prefix_cache_sharing=sharing)
    app = create_app(ServerState(config, models=ModelRegistry([service])), 8000)
    transport = httpx.ASGITransport(app)

    async def cached(http: httpx.AsyncClient, headers: dict[str, str], path: str, **more: Any) -> int:
        body = {
            "prompt": PROMPT,
            "messages": [{"role": "user", "content": "secret"}],
            "max_tokens": 1,
            **more,
        }
        body.pop("messages" if path == "completions" else "prompt")
        response = (await http.post(f"/v1/{path}", json=body, headers=headers)).json()
        n: int = response["usage"]["prompt_tokens_details"]["cached_tokens"]
        return n

    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
        for path in ("completions", "chat/completions"):
            for salt in ("", "x"):
                assert await cached(http, ONE, path, cache_salt=salt) == 0
                own = await cached(http, ONE, path, cache_salt=salt)
                assert own > 0
                assert await cached(http, TWO, path, cache_salt=salt) == (0 if sharing == "per-key" else own)
    await service.close()


async def test_a_restored_session_belongs_to_its_key(http: httpx.AsyncClient) -> None:
    await generate(http, "chat", cache_salt="x")
    await http.post("/v1/sessions/chat/save", json={"file": "monday"})
    assert (await http.delete("/v1/sessions/chat")).status_code == 200
    restored = {"file": "monday", "cache_salt": "restored"}
    assert (await http.post("/v1/sessions/again/restore", json=restored)).json() == shown("again", N_TOKENS)
    for headers, n in ((TWO, 0), (ONE, len(PROMPT) - 1)):
        body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": "restored"}
        response = (await http.post("/v1/completions", json=body, headers=headers)).json()
        assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == n


async def test_a_key_has_its_own_sessions_and_files(
    http: httpx.AsyncClient, calls_with: Callable[[str, str], list[tuple[str, str]]]
) -> None:
    """Every route with a session's name is called; a new route is one more call."""
    bodies = {
        "trim": {"n_tokens": 0},
        "fork": {"session_id": "mine"},
        "save": {"file": "mine"},
        "restore": {"file": "monday"},
    }
    await generate(http, "chat")
    await http.post("/v1/sessions/chat/save", json={"file": "monday"})
    assert (await http.get("/v1/sessions", headers=TWO)).json()["data"] == []
    for method, path in calls_with("session_id", "chat"):
        body = bodies.get(path.rpartition("/")[2])
        response = await http.request(method, path, json=body, headers=TWO)
        assert error(response)[:2] == (404, "not_found"), path
    assert (await generate(http, "chat", headers=TWO)).status_code == 200, "a session of the same name"
    assert (await http.get("/v1/sessions/chat")).json()["num_tokens"] == N_TOKENS


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_no_name_leads_outside_the_session_store(
    http: httpx.AsyncClient, tmp_path: Path, name: str
) -> None:
    await generate(http, "chat")
    for path, body in (
        ("/v1/sessions/chat/save", {"file": name}),
        ("/v1/sessions/new/restore", {"file": name}),
        ("/v1/sessions", {"session_id": name}),
        ("/v1/sessions/chat/fork", {"session_id": name}),
    ):
        status, _, param = error(await http.post(path, json=body))
        assert (status, param) == (400, next(iter(body)))
    assert error(await generate(http, name))[::2] == (400, "session_id")
    assert (await http.get(f"/v1/sessions/{name}")).status_code in (400, 404)
    assert (await http.post(f"/v1/sessions/{name}/save", json={"file": "a"})).status_code in (400, 404, 405)
    assert os.listdir(tmp_path) == ["store"]
    assert os.listdir(tmp_path / "store") == []


@pytest.mark.parametrize("http", [{"session_store": None}], indirect=True)
async def test_without_a_session_store_saving_names_the_setting(http: httpx.AsyncClient) -> None:
    await generate(http, "chat")
    for path in ("chat/save", "new/restore"):
        response = await http.post(f"/v1/sessions/{path}", json={"file": "a"})
        assert error(response) == (400, "unsupported_value", "session_store")
        assert "session_store" in response.json()["error"]["message"]


@pytest.mark.parametrize("http", [{"enable_prefix_caching": False}], indirect=True)
async def test_without_the_prefix_cache_sessions_are_rejected(http: httpx.AsyncClient) -> None:
    assert error(await generate(http, "chat"))[0] == 400
    created = await http.post("/v1/sessions", json={"session_id": "a"})
    assert error(created) == (400, "unsupported_value", "session_id")


@pytest.mark.parametrize("http", [{"max_sessions": 1}], indirect=True)
async def test_too_many_sessions_are_429(http: httpx.AsyncClient) -> None:
    for name, status in (("a", 200), ("b", 429)):
        assert (await http.post("/v1/sessions", json={"session_id": name})).status_code == status
    assert error(await http.post("/v1/sessions", json={"session_id": "a"})) == (
        400,
        "invalid_value",
        "session_id",
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {}, "session_id"),
        ("", {"session_id": 3}, "session_id"),
        ("", {"session_id": "a", "more": 1}, "more"),
        ("/chat/trim", {"n_tokens": -1}, "n_tokens"),
        ("/chat/trim", {"n_tokens": True}, "n_tokens"),
        ("/chat/trim", {"n_tokens": "3"}, "n_tokens"),
        ("/chat/trim", {"n_tokens": 10**9}, "n_tokens"),
        ("/chat/fork", {"session_id": "b", "n_tokens": 2**40}, "n_tokens"),
        ("/chat/fork", {"session_id": "chat"}, "session_id"),
        ("/new/restore", {"file": "a", "cache_salt": "\ud800"}, "cache_salt"),
    ],
)
async def test_invalid_session_bodies_are_rejected(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    await generate(http, "chat")
    raw = json.dumps(body)  # httpx cannot encode a lone surrogate
    headers = {"content-type": "application/json"}
    response = await http.post(f"/v1/sessions{path}", content=raw, headers=headers)
    assert error(response)[::2] == (400, param)


async def test_a_session_needs_exactly_one_prompt(http: httpx.AsyncClient) -> None:
    assert error(await generate(http, "chat", ["a", "b"]))[::2] == (400, "session_id")
    assert (await http.get("/v1/sessions")).json()["data"] == []


async def test_each_model_has_its_own_sessions(http: httpx.AsyncClient) -> None:
    for method, path in (("GET", ""), ("GET", "/a"), ("DELETE", "/a")):
        response = await http.request(method, f"/v1/sessions{path}", params={"model": "other"})
        assert error(response) == (404, "model_not_found", "model")


def test_the_openapi_document_has_all_session_routes() -> None:
    schema = create_routes(ServerState(Config())).openapi()
    paths = {path for path in schema["paths"] if path.startswith(("/v1/sessions", "/v1/requests"))}
    assert paths == {
        "/v1/sessions",
        "/v1/sessions/{session_id}",
        *(f"/v1/sessions/{{session_id}}/{what}" for what in ("fork", "trim", "save", "restore")),
        "/v1/requests",
        "/v1/requests/{request_id}/cancel",
        "/v1/requests/{request_id}/timeline",
    }
    for path in paths:
        for operation in schema["paths"][path].values():
            responses = operation["responses"]
            assert "$ref" in responses["200"]["content"]["application/json"]["schema"]
            for status in ("400", "401", "404", "429", "503"):
                assert responses[status]["content"]["application/json"]["schema"]["$ref"].endswith(
                    "ErrorAnswer"
                )
