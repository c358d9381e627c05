"""Load the core with fault points instead of the shipped one, also in processes that a test starts."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import llaisys

CORE = Path(__file__).parents[1] / ".venv" / "faults" / "_core.abi3.so"


def load() -> ModuleType:
    """Return the module with `fault_points`, `fault_hits` and `set_fault`, to be loaded once per process."""
    loader = importlib.machinery.ExtensionFileLoader("llaisys._core", str(CORE))
    spec = importlib.util.spec_from_loader("llaisys._core", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def install(order: str) -> None:
    """Use this core in a new process.

    The file `order` holds `point action nth`: the first process that finds it removes it and sets this fault.
    """
    core = load()
    sys.modules["llaisys._core"] = core
    llaisys._core = core  # type: ignore[attr-defined]
    path = Path(order)
    if path.exists():
        point, action, nth = path.read_text("utf-8").split()
        path.unlink()
        core.set_fault(point, action, int(nth))
