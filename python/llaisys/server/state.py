"""What the routes share. Owned by the event loop; written by `run.py` alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from llaisys.config import Config
from llaisys.errors import EngineDeadError
from llaisys.server.errors import (
    ApiError,
    engine_dead,
    loading,
    model_not_found,
    shutting_down,
    to_api_error,
)
from llaisys.server.metrics import Metrics
from llaisys.service import AsyncLLM


@dataclass(slots=True)
class ServerState:
    """Where the server is in its life: loading (no engine yet), serving, draining.

    - `engine`: set once, when the model is in memory.
    - `draining`: set once, at the first signal; new requests get 503 from then on.
    - `created_s`: Unix time of the start, reported as the model's `created`.
    """

    config: Config
    metrics: Metrics = field(default_factory=Metrics)
    engine: AsyncLLM | None = None
    draining: bool = False
    created_s: int = field(default_factory=lambda: int(time.time()))

    def serving(self) -> AsyncLLM:
        """The engine, or the 503 that says why there is none for a request."""
        if self.draining:
            raise shutting_down()
        if self.engine is None:
            raise loading()
        if not self.engine.is_alive():
            raise engine_dead()
        return self.engine

    def is_healthy(self) -> bool:
        """False once the engine is dead. Loading and draining are healthy."""
        return self.engine is None or self.draining or self.engine.is_alive()

    def is_ready(self) -> bool:
        """True while new requests are welcome."""
        return not self.draining and self.engine is not None and self.engine.is_ready()

    def wire_error(self, error: Exception, request_id: str) -> ApiError:
        """What a client hears of an error. An engine that ends because we are draining is no failure."""
        if self.draining and isinstance(error, EngineDeadError):
            return shutting_down()
        return to_api_error(error, request_id)


def state_of(request: Request) -> ServerState:
    """The server's state."""
    state: ServerState = request.app.state.server
    return state


def served_name(engine: AsyncLLM, model: str | None) -> str:
    """The name to answer with. Absent, empty and `default` mean the first; an unknown one is a 404."""
    if model in engine.model_names:
        return str(model)
    if not model or model == "default":
        return engine.model_names[0]
    raise model_not_found(model)
