"""A server with a key, as the official client and a browser see it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from serving import GOLDENS, Server, serving


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("locked")
    flags = ("--served-model-name", "first", "--served-model-name", "second", "--strict-fields")
    with serving(folder, str(GOLDENS / "qwen3-tied-bf16"), *flags, key="secret-1,secret-2") as server:
        yield server


def test_keys(locked: Server) -> None:
    for key in ("secret-1", "secret-2"):
        client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key)
        answer = client.completions.create(model="second", prompt="Hello", max_tokens=2)
        assert answer.model == "second"
        assert [card.id for card in client.models.list()] == ["first", "second"]
    stranger = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="EMPTY", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        stranger.completions.create(model="first", prompt="Hello")
    assert caught.value.code == "invalid_api_key"


def test_what_needs_no_key(locked: Server) -> None:
    with httpx.Client(base_url=locked.url) as stranger:
        for path in ("/", "/livez", "/health", "/ready"):
            assert stranger.get(path).status_code == 200
        for path in ("/metrics", "/version", "/v1/models", "/docs", "/nothing"):
            assert stranger.get(path).status_code == 401


def test_strict_fields(locked: Server) -> None:
    body = {"prompt": "Hello", "frobnicate": 1}
    answer = locked.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "frobnicate")


def test_other_hosts_and_origins_are_shut_out(locked: Server) -> None:
    assert locked.http.get("/v1/models", headers={"host": "evil.example"}).status_code == 400
    assert locked.http.get("/v1/models", headers={"origin": "http://evil.example"}).status_code == 403


def test_keys_are_nowhere_in_the_log(locked: Server) -> None:
    locked.http.get("/v1/models?key=secret-1", headers={"authorization": "Bearer secret-1x"})
    assert "secret-" not in locked.log.read_text("utf-8")
