"""ServerState: what routes share, and RequestRegistry: the open requests. Event loop only."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.errors import EngineDeadError, QueueFullError, RejectedError
from llaisys.outputs import RequestId
from llaisys.registry import ModelRegistry
from llaisys.server.http_errors import (
    REQUEST_TIMEOUT,
    ApiError,
    engine_dead,
    loading,
    model_not_found,
    shutting_down,
    to_api_error,
)
from llaisys.server.metrics import Metrics
from llaisys.server.middleware.auth import Keyring
from llaisys.server.response_body import ResponseBytes
from llaisys.server.responses.background import BackgroundRuns
from llaisys.server.responses.store import ResponseStore
from llaisys.server.tracing import RequestTracer
from llaisys.server.webui.chat_store import ChatStore

N_ENDED_MAX = 1024


@dataclass(slots=True)
class RequestEntry:
    """One HTTP request for a completion.

    - `id`: its id over HTTP, unique among the requests of `client_id` (the name of the sender's key).
    - `request_ids`: the engine's requests for it, one for each prompt, with `n` choices each.
    - `cancel`: cancels it; None once it has ended. `opened_s`: `time.monotonic` seconds.
    """

    id: str
    client_id: str
    engine: AsyncLLM
    request_ids: Sequence[RequestId]
    n: int
    cancel: Callable[[], None] | None = None
    opened_s: float = field(default_factory=time.monotonic)


class RequestRegistry:
    """All open requests and the newest `N_ENDED_MAX` ended ones, for cancellation and timelines.

    Invariant: the ids of one client are unique.
    """

    def __init__(self) -> None:
        # By client and id.
        self._entries: OrderedDict[tuple[str, str], RequestEntry] = OrderedDict()
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._by_request: dict[RequestId, RequestEntry] = {}

    @contextmanager
    def open(self, entry: RequestEntry, cancel: Callable[[], None]) -> Iterator[None]:
        """Keep the entry open for the duration of the context.

        Raises RejectedError if another open request of the client has its id.
        """
        key = (entry.client_id, entry.id)
        old = self._entries.get(key)
        if old is not None and old.cancel is not None:
            raise RejectedError(f"request id {entry.id!r} is in use", param="request_id")
        if old is not None:
            self._remove(old)
        entry.cancel = cancel
        self._entries[key] = entry
        self._by_request |= dict.fromkeys(entry.request_ids, entry)
        try:
            yield
        finally:
            entry.cancel = None
            self._ended[key] = None
            if len(self._ended) > N_ENDED_MAX:
                self._remove(self._entries[next(iter(self._ended))])

    def find(self, id: str, client_id: str) -> RequestEntry:
        """Return the client's entry. Raises ApiError (404) for an unknown id, and for another client's."""
        entry = self._entries.get((client_id, id))
        if entry is None:
            raise ApiError(404, "There is no such request.", code="not_found", param="request_id")
        return entry

    def newest(self, client_id: str) -> Iterator[RequestEntry]:
        """Yield the client's entries, open and ended, newest first."""
        return (entry for entry in reversed(self._entries.values()) if entry.client_id == client_id)

    def name(self, request_id: RequestId, client_id: str) -> str:
        """Return the HTTP id of an engine request if it is the client's, otherwise `other`."""
        entry = self._by_request.get(request_id)
        return entry.id if entry is not None and entry.client_id == client_id else "other"

    def _remove(self, entry: RequestEntry) -> None:
        key = (entry.client_id, entry.id)
        del self._entries[key], self._ended[key]
        for request_id in entry.request_ids:
            if self._by_request.get(request_id) is entry:
                del self._by_request[request_id]


@dataclass(slots=True)
class ServerState:
    """The server's phase (loading, serving, draining) and the objects that its routes share.

    - `keys`: the accepted keys, by default those of `config`.
    - `models`: None while loading; set once, when the preloaded models are loaded.
    - `chats`: the web UI's chats; None without `--chat-store`.
    - `responses`: the stored responses; None without `--response-store`.
    - `background`: the responses that are generated without a client.
    - `requests`: open and recently ended requests.
    - `draining`: set once, at the first signal; new requests then get 503.
    - `pull`: the newest download of a model for a client, with its error; None before the first.
    - `tracer`: sends traces; None without `--otlp-traces-endpoint`.
    - `response_bytes`: counts the bytes of responses that are not streamed.
    - `created_s`: Unix time of the start, reported as the model's `created`.
    """

    config: Config
    keys: Keyring = field(default_factory=Keyring)
    metrics: Metrics = field(default_factory=Metrics)
    models: ModelRegistry | None = None
    chats: ChatStore | None = None
    responses: ResponseStore | None = None
    requests: RequestRegistry = field(default_factory=RequestRegistry)
    tracer: RequestTracer | None = None
    draining: bool = False
    pull: asyncio.Future[str | None] | None = None
    created_s: int = field(default_factory=lambda: int(time.time()))
    response_bytes: ResponseBytes = field(init=False)
    background: BackgroundRuns = field(init=False)

    def __post_init__(self) -> None:
        self.keys = self.keys or Keyring.of(self.config)
        config = self.config
        self.background = BackgroundRuns(self.keys.n_clients)
        self.response_bytes = ResponseBytes(
            config.max_response_bytes, config.max_response_bytes_in_flight, self.keys.n_clients
        )

    def registry(self) -> ModelRegistry:
        """Return the models. Raises ApiError (503) while loading or draining, and if every engine is dead."""
        if self.draining:
            raise shutting_down()
        if self.models is None:
            raise loading()
        if not any(service.is_alive() for service in self.models.services):
            raise engine_dead()
        return self.models

    def serving(self, model: str | None) -> AsyncLLM:
        """Return the model with a name; None, empty and `default` mean the first.

        Raises ApiError: 404 for an unknown name, 503 if the model cannot serve.
        """
        service = self.registry().find(model)
        if service is None:
            raise model_not_found(str(model))
        if not service.is_alive():
            raise engine_dead()
        return service

    def refusal(self, client_id: str) -> QueueFullError | None:
        """Return the error if no model would queue a request of this client.

        None if a model may queue it, or if the route responds 503.
        """
        return None if self.draining or self.models is None else self.models.refusal(client_id)

    def unavailable(self) -> ApiError | None:
        """Return the 503 of `/health` and `/ready`: draining, loading or a dead engine.

        None if all models serve.
        """
        if self.draining:
            return shutting_down()
        if self.models is None:
            return loading()
        return None if self.models.is_ready() else engine_dead()

    def wire_error(self, error: Exception, request_id: str) -> ApiError:
        """Return the error as the client receives it.

        The end of an engine during a drain is a shutdown. A timeout has the configured status.
        """
        if self.draining and isinstance(error, EngineDeadError):
            return shutting_down()
        api_error = to_api_error(error, request_id)
        if api_error.code == REQUEST_TIMEOUT:
            api_error.status_code = self.config.request_timeout_status
        return api_error


def state_of(request: Request) -> ServerState:
    """Return the server's state."""
    state: ServerState = request.app.state.server
    return state
