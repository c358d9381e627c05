"""What the routes share. Owned by the event loop; written by `run.py` alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from llaisys.config import Config
from llaisys.errors import EngineDeadError, QueueFullError
from llaisys.registry import ModelRegistry
from llaisys.server.bodies import OpenRequest
from llaisys.server.book import RequestBook
from llaisys.server.chat_store import ChatStore
from llaisys.server.errors import (
    ApiError,
    engine_dead,
    loading,
    model_not_found,
    shutting_down,
    to_api_error,
)
from llaisys.server.keys import Keyring
from llaisys.server.metrics import Metrics
from llaisys.server.pieces import ResponseBytes
from llaisys.server.protocol import ignored_fields
from llaisys.server.spans import Spans
from llaisys.server.trace import ignored_headers
from llaisys.service import AsyncLLM


@dataclass(slots=True)
class ServerState:
    """Where the server is in its life: loading (no models yet), serving, draining.

    - `keys`: those that `config` names, unless they were taken out of it already, as `run.py` does.
    - `models`: set once, when the models that are to be preloaded are in memory.
    - `chats`: the page's chats, None without `--chat-store`.
    - `requests`: the answers that are being given, and those of lately.
    - `draining`: set once, at the first signal; new requests get 503 from then on.
    - `spans`: what sends traces, None without `--otlp-traces-endpoint`.
    - `response_bytes`: those of whole answers, counted.
    - `created_s`: Unix time of the start, reported as the model's `created`.
    """

    config: Config
    keys: Keyring = field(default_factory=Keyring)
    metrics: Metrics = field(default_factory=Metrics)
    models: ModelRegistry | None = None
    chats: ChatStore | None = None
    requests: RequestBook = field(default_factory=RequestBook)
    spans: Spans | None = None
    draining: bool = False
    created_s: int = field(default_factory=lambda: int(time.time()))
    response_bytes: ResponseBytes = field(init=False)

    def __post_init__(self) -> None:
        self.keys = self.keys or Keyring.of(self.config)
        config = self.config
        self.response_bytes = ResponseBytes(
            config.max_response_bytes, config.max_response_bytes_in_flight, self.keys.n_clients
        )

    def registry(self) -> ModelRegistry:
        """The models, or the 503 that says why there are none for a request."""
        if self.draining:
            raise shutting_down()
        if self.models is None:
            raise loading()
        if not any(service.is_alive() for service in self.models.services):
            raise engine_dead()
        return self.models

    def serving(self, model: str | None) -> AsyncLLM:
        """The model of this name (absent, empty, `default`: the first), 404, or the 503 that says why not."""
        service = self.registry().find(model)
        if service is None:
            raise model_not_found(str(model))
        if not service.is_alive():
            raise engine_dead()
        return service

    def refusal(self, client_id: str) -> QueueFullError | None:
        """Why no request of a client would be queued: its places in every model's queue are taken. None: one
        may be, or hears the 503."""
        return None if self.draining or self.models is None else self.models.refusal(client_id)

    def unavailable(self) -> ApiError | None:
        """The 503 of `/health` and `/ready`: draining, loading, or a dead engine. None: all models serve."""
        if self.draining:
            return shutting_down()
        if self.models is None:
            return loading()
        return None if self.models.is_ready() else engine_dead()

    def wire_error(self, error: Exception, request_id: str) -> ApiError:
        """What a client hears of an error. An engine that ends because we are draining is no failure."""
        if self.draining and isinstance(error, EngineDeadError):
            return shutting_down()
        return to_api_error(error, request_id)


def state_of(request: Request) -> ServerState:
    """The server's state."""
    state: ServerState = request.app.state.server
    return state


def engine_of(
    request: Request, body: OpenRequest, neutral: Mapping[str, tuple[Any, ...]]
) -> tuple[AsyncLLM, dict[str, str]]:
    """The model that a body asks, and the headers that name its fields that have no effect.

    `neutral`: fields that are known and not supported, each with the values that ask for nothing. Raises as
    `ServerState.serving` and `ignored_fields`.
    """
    state = state_of(request)
    engine = state.serving(body.model)
    return engine, ignored_headers(request, ignored_fields(body, neutral, state.config.strict_fields))


def served_name(engine: AsyncLLM, model: str | None) -> str:
    """The name to answer with: the one that was asked for, or the first."""
    return str(model) if model in engine.model_names else engine.model_names[0]
