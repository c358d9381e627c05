"""A client of an engine process that collects its outputs."""

from __future__ import annotations

import queue
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from children import engine_processes
from golden import FOLDER, load_golden
from llaisys.config import Config
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.host import Cpus
from llaisys.engine.memory import EngineSizing, size_engine
from llaisys.engine.process import ProcessClient
from llaisys.engine.request import EngineRequest
from llaisys.engine.worker import inspect_model
from llaisys.errors import EngineDeadError
from llaisys.outputs import FinishReason
from llaisys.sampling_params import SamplingParams
from serving import END_S
from waiting import block_until

SETTINGS: dict[str, Any] = {"model": str(FOLDER), "dtype": "float32", "num_kv_cells": 4096}


def sizing(folder: Path = FOLDER, **settings: Any) -> EngineSizing:
    return size_engine(
        Config(**{**SETTINGS, "model": str(folder), **settings}), inspect_model(folder), 2**30, Cpus(1)
    )


class Client:
    """A `ProcessClient` that collects its outputs."""

    def __init__(self, made: EngineSizing | None = None) -> None:
        self.outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self.now_s = 0.0
        self.client = ProcessClient(made or sizing(), Config(**SETTINGS), self.deliver, lambda: self.now_s)

    def deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.outputs.put(output)

    def submit(self, name: str, max_tokens: int = 200) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.client.submit(
            EngineRequest(
                request_id=name,
                prompt_token_ids=load_golden().prompts[0],
                params=params,
                eos_token_ids=(),
                arrival_s=0.0,
                deadline_s=float("inf"),
            )
        )

    def end_of(self, name: str) -> EngineOutput:
        while True:
            output = self.outputs.get(timeout=END_S)
            assert output.request_id == name
            if output.finish_reason is not None:
                return output

    def child(self) -> psutil.Process:
        (found,) = engine_processes()
        return found

    def submit_to_a_stopped_child(self, name: str) -> psutil.Process:
        """Submit a request that stays open until the child is killed or resumed."""
        child = self.child()
        child.suspend()
        self.submit(name)
        return child

    def back(self) -> None:
        """Wait until a new child serves a request."""

        def serves() -> bool:
            with suppress(EngineDeadError):
                self.submit("back", max_tokens=1)
                return self.end_of("back").finish_reason is FinishReason.LENGTH
            return False

        block_until(serves)
