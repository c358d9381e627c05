"""Fixtures for fault injection, on a core with fault points (`make faults-core`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import faulty
import llaisys


@pytest.fixture(scope="session")
def faulty_core() -> ModuleType:
    """Return the module with `fault_points`, `fault_hits` and `set_fault`, loaded once."""
    if not faulty.CORE.exists():
        pytest.fail(f"{faulty.CORE} is not built: make faults-core")
    return faulty.load()


@pytest.fixture(autouse=True)
def core(faulty_core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Replace `llaisys._core` with this module, and switch every fault off at the end."""
    monkeypatch.setitem(sys.modules, "llaisys._core", faulty_core)
    monkeypatch.setattr(llaisys, "_core", faulty_core, raising=False)
    yield faulty_core
    for point in faulty_core.fault_points():
        faulty_core.set_fault(point, "off")
