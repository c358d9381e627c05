"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys

import pytest

import llaisys
from fakes import core, text
from fakes.clock import FakeClock
from llaisys.model import Model


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's `LLAISYS_*` variables do not reach the tests; the model cache does."""
    for name in os.environ:
        if name.startswith("LLAISYS_") and name != "LLAISYS_HOME":
            monkeypatch.delenv(name)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """`llaisys._core` is the fake."""
    monkeypatch.setitem(sys.modules, "llaisys._core", core)
    monkeypatch.setattr(llaisys, "_core", core, raising=False)


@pytest.fixture
def fake_model(fake_core: None, monkeypatch: pytest.MonkeyPatch) -> Model:  # noqa: ARG001 -- its effect is needed
    """A model on the fake core, which `LLM` and `AsyncLLM` find whatever they are asked for."""
    made = text.model()
    monkeypatch.setattr("llaisys.llm.open_model", lambda _: made)
    monkeypatch.setattr("llaisys.service.open_model", lambda _: made)
    return made
