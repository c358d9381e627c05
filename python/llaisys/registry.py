"""The served models by name: which service answers a request that names one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llaisys.body import Flaw, read_body
from llaisys.config import Config
from llaisys.errors import QueueFullError
from llaisys.service import AsyncLLM
from llaisys.text.pool import TextPool


class ModelRegistry:
    """Owns a service for each model; a server of one model has a registry of one. Event loop only."""

    def __init__(self, services: Sequence[AsyncLLM], text_pool: TextPool | None = None) -> None:
        """The first of `services` is the default. `text_pool`: their text processes, closed with them."""
        self._text_pool = text_pool
        self.services = tuple(services)
        self._by_name = {name: service for service in self.services for name in service.model_names}

    @classmethod
    async def start(cls, config: Config, *, n_clients: int = 1) -> ModelRegistry:
        """Opens every model, one after the other, and loads those that are to be preloaded. For a server: the
        process may be ended with a stuck engine. `n_clients`: clients with shares, as in `AsyncLLM.start`.

        Raises RejectedError or UnsupportedError, naming the model or the setting; then nothing is left open.
        """
        services: list[AsyncLLM] = []
        text_pool = TextPool()
        try:
            for each in config.each_model():
                services.append(
                    await AsyncLLM.start(each, exits=True, text_pool=text_pool, n_clients=n_clients)
                )
            await text_pool.ready()
        except BaseException:
            await cls(services, text_pool).close()
            raise
        return cls(services, text_pool)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a request may use."""
        return tuple(self._by_name)

    def find(self, name: str | None) -> AsyncLLM | None:
        """The service of a name; None, empty and `default` mean the first. None if there is no such model."""
        if not name or (name == "default" and name not in self._by_name):
            return self.services[0]
        return self._by_name.get(name)

    async def read_body(self, raw: bytes, model: str | None) -> tuple[Any, Flaw | None]:
        """A large body, off the event loop; see `llaisys.body.read_body`."""
        if self._text_pool is None:
            return await asyncio.to_thread(read_body, raw, model)
        return await self._text_pool.read_body(raw, model)

    def is_alive(self) -> bool:
        """False while any engine is dead."""
        return all(service.is_alive() for service in self.services)

    def is_ready(self) -> bool:
        """True while requests for every model are welcome."""
        return all(service.is_ready() for service in self.services)

    def refusal(self, client_id: str = "") -> QueueFullError | None:
        """Why a client's new request would be refused now, whichever model it names: that of the soonest to
        have room again. None: it may be taken."""
        refusals = [service.refusal(client_id) for service in self.services]
        known = [each for each in refusals if each is not None]
        return min(known, key=lambda each: each.retry_after_s) if len(known) == len(refusals) else None

    def is_stuck(self) -> bool:
        """True once an engine of this process was given up: the process should end."""
        return any(service.is_stuck() for service in self.services)

    def is_lost(self) -> bool:
        """True once any engine is dead and nothing restarts it: the server should end."""
        return any(service.is_lost() for service in self.services)

    def beat(self) -> None:
        """The event loop came round."""
        for service in self.services:
            service.beat()

    async def close(self, drain_s: float = 0.0) -> None:
        """Closes every service, at the same time; see `AsyncLLM.close`."""
        await asyncio.gather(*(service.close(drain_s) for service in self.services))
        if self._text_pool is not None:
            await self._text_pool.close()
