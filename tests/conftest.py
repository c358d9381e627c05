"""Fixtures that all tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

import llaisys
from fakes import core, text
from fakes.clock import FakeClock
from llaisys.model_assets import ModelAssets
from serving import Server, serving

# A shell that runs the tests in the background ignores SIGINT, and every program that they start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine may be slow: no test of Hypothesis compares with a clock.
settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--model-path", type=Path, help="a Hugging Face folder: acceptance tests compare it with transformers"
    )


def pytest_configure() -> None:
    """Pin each of several test workers (`-n`) to one CPU, so that its engines run one kernel thread."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[int(worker.removeprefix("gw")) % len(cpus)]})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need `--model-path` if it is not given."""
    if config.getoption("--model-path") is None:
        live = [item for item in items if item.get_closest_marker("live")]
        config.hook.pytest_deselected(items=live)
        items[:] = [item for item in items if not item.get_closest_marker("live")]


@pytest.fixture
def model_path(request: pytest.FixtureRequest) -> Path:
    """The folder of `--model-path`."""
    path: Path = request.config.getoption("--model-path")
    return path


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a developer's `LLAISYS_*` variables from the tests, except for the model cache."""
    for name in os.environ:
        if name.startswith("LLAISYS_") and name != "LLAISYS_HOME":
            monkeypatch.delenv(name)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `llaisys._core` with the fake core."""
    monkeypatch.setitem(sys.modules, "llaisys._core", core)
    monkeypatch.setattr(llaisys, "_core", core, raising=False)


@pytest.fixture
def fake_model(fake_core: None, monkeypatch: pytest.MonkeyPatch) -> ModelAssets:  # noqa: ARG001 -- its effect is needed
    """The assets of a model on the fake core, which `LLM` and `AsyncLLM` load for any name."""
    made = text.model()
    monkeypatch.setattr("llaisys.llm.load_model_assets", lambda _: made)
    monkeypatch.setattr("llaisys.async_llm.load_model_assets", lambda _: made)
    return made


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2 with the settings of `make serve`, and 2,048 cells."""
    folder = tmp_path_factory.mktemp("smollm2")
    flags = ("--num-kv-cells", "2048", "--response-store", str(folder / "responses.db"))
    with serving(folder, "smollm2", *flags) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_server(smollm2: Server) -> str:
    """The address of the SmolLM2 server."""
    return smollm2.url


@pytest.fixture(scope="session")
def smollm2_process(smollm2: Server) -> psutil.Process:
    """The process of the SmolLM2 server."""
    return psutil.Process(smollm2.process.pid)
