"""The model registry: routing by name, health of all models, and start."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import core
from fakes.service import FakeService
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.engine.worker import core_digest
from llaisys.errors import RejectedError
from llaisys.registry import ModelRegistry
from llaisys.sampling_params import RequestOutputKind, SamplingParams

A, B = FakeService(model_names=("a", "a2")), FakeService(model_names=("b", "default/b"))


def registry(*services: Any) -> ModelRegistry:
    return ModelRegistry(services)


def test_requests_are_routed_by_model_name() -> None:
    both = registry(A, B)
    assert both.names == ("a", "a2", "b", "default/b")
    for name, service in (("a", A), ("a2", A), ("b", B), ("", A), (None, A), ("default", A)):
        assert both.find(name) is service
    assert both.find("c") is None
    named = FakeService(model_names=("default",))
    assert registry(A, named).find("default") is named


def test_health_covers_all_models() -> None:
    dead = FakeService(dead=True)
    assert registry(A, B).is_alive()
    assert registry(A, B).is_ready()
    assert not registry(A, dead).is_alive()
    assert not registry(A, dead).is_ready()


@pytest.mark.usefixtures("fake_model")
async def test_each_entry_gets_its_engine() -> None:
    config = Config(
        models=({"name": "a", "num_kv_cells": 100}, {"name": "b", "num_kv_cells": 200, "preload": False})
    )
    both = await ModelRegistry.start(config)
    a, b = both.services
    assert (both.names, a.is_loaded(), b.is_loaded()) == (("a", "b"), True, False)
    params = SamplingParams(temperature=0.0, max_tokens=3, output_kind=RequestOutputKind.DELTA)
    for service in (a, b):
        ids = [i async for d in service.generate([1], params, "r") for i in d.outputs[0].token_ids]
        assert ids == core.answer([1], 3)
    assert (a.stats().engine.kv_cells, b.stats().engine.kv_cells) == (100, 200)
    await both.close()
    assert not both.is_alive()


@pytest.mark.usefixtures("fake_model")
async def test_the_start_computes_the_digest_of_the_core() -> None:
    """It reads the core's whole library, which the first completion would cost on the event loop."""
    core_digest.cache_clear()
    models = await ModelRegistry.start(Config(num_kv_cells=100))
    assert core_digest.cache_info().currsize == 1
    await models.close()


@pytest.mark.usefixtures("fake_model")
async def test_a_failed_start_closes_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[core.Context] = []
    monkeypatch.setattr(core.Context, "close", lambda context: closed.append(context))
    with pytest.raises(RejectedError, match="max_model_len"):
        await ModelRegistry.start(Config(models=({"name": "a"}, {"name": "b", "max_model_len": 4096})))
    assert len(closed) == 1


async def test_only_a_server_accepts_several_models() -> None:
    with pytest.raises(RejectedError, match="llaisys serve"):
        await AsyncLLM.start(Config(models=({"name": "a"},)))
