"""Tests that make the core fail: they run on a build of its own, with fault points (`make faults-core`)."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import llaisys

CORE = Path(__file__).parents[2] / ".venv" / "faults" / "_core.abi3.so"


@pytest.fixture(scope="session")
def faulty_core() -> ModuleType:
    """The module with `fault_points`, `fault_hits` and `set_fault`; loaded once, for modules of Rust stay."""
    if not CORE.exists():
        pytest.fail(f"{CORE} is not built: make faults-core")
    loader = importlib.machinery.ExtensionFileLoader("llaisys._core", str(CORE))
    spec = importlib.util.spec_from_loader("llaisys._core", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def core(faulty_core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """That module in the place of `llaisys._core`, with every fault off before and after."""
    monkeypatch.setitem(sys.modules, "llaisys._core", faulty_core)
    monkeypatch.setattr(llaisys, "_core", faulty_core, raising=False)
    yield faulty_core
    for point in faulty_core.fault_points():
        faulty_core.set_fault(point, "off")
