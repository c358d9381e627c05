"""The served models by name: which service answers a request that names one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llaisys.config import Config
from llaisys.service import AsyncLLM


class ModelRegistry:
    """Owns a service for each model; a server of one model has a registry of one. Event loop only."""

    def __init__(self, services: Sequence[AsyncLLM]) -> None:
        """The first of `services` is the default."""
        self.services = tuple(services)
        self._by_name = {name: service for service in self.services for name in service.model_names}

    @classmethod
    async def start(cls, config: Config) -> ModelRegistry:
        """Opens every model, one after the other, and loads those that are to be preloaded. For a server: the
        process may be ended with a stuck engine.

        Raises RejectedError or UnsupportedError, naming the model or the setting; then nothing is left open.
        """
        services: list[AsyncLLM] = []
        try:
            for each in config.each_model():
                services.append(await AsyncLLM.start(each, exits=True))
        except BaseException:
            await cls(services).close()
            raise
        return cls(services)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a request may use."""
        return tuple(self._by_name)

    def find(self, name: str | None) -> AsyncLLM | None:
        """The service of a name; None, empty and `default` mean the first. None if there is no such model."""
        if not name or (name == "default" and name not in self._by_name):
            return self.services[0]
        return self._by_name.get(name)

    def is_alive(self) -> bool:
        """False while any engine is dead."""
        return all(service.is_alive() for service in self.services)

    def is_ready(self) -> bool:
        """True while requests for every model are welcome."""
        return all(service.is_ready() for service in self.services)

    def is_stuck(self) -> bool:
        """True once an engine of this process was given up: the process should end."""
        return any(service.is_stuck() for service in self.services)

    def beat(self) -> None:
        """The event loop came round."""
        for service in self.services:
            service.beat()

    async def close(self, drain_s: float = 0.0) -> None:
        """Closes every service, at the same time; see `AsyncLLM.close`."""
        await asyncio.gather(*(service.close(drain_s) for service in self.services))
