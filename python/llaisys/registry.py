"""ModelRegistry: the served models by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llaisys.async_llm import AsyncLLM
from llaisys.body import InvalidField, read_body
from llaisys.config import Config
from llaisys.errors import QueueFullError, RejectedError
from llaisys.text.tokenizer_pool import TokenizerPool


class ModelRegistry:
    """Owns an AsyncLLM for each served model. Event loop only."""

    def __init__(self, services: Sequence[AsyncLLM], tokenizer_pool: TokenizerPool | None = None) -> None:
        """`services`: the first is the default. `tokenizer_pool`: shared by them, and closed with them."""
        self._tokenizer_pool = tokenizer_pool
        self.services = tuple(services)
        self._by_name = {name: service for service in self.services for name in service.model_names}

    @classmethod
    async def start(cls, config: Config, *, n_clients: int = 1) -> ModelRegistry:
        """Open every model, one after the other, and load those with `preload`.

        For servers only, because a stuck engine ends the process. `n_clients`: as in `AsyncLLM.start`. Raises
        RejectedError or UnsupportedError naming the model or the setting, after closing all models.
        """
        services: list[AsyncLLM] = []
        tokenizer_pool = TokenizerPool()
        try:
            for each in config.each_model():
                services.append(
                    await AsyncLLM.start(each, exits=True, tokenizer_pool=tokenizer_pool, n_clients=n_clients)
                )
            await tokenizer_pool.ready()
            cls(services).check_names()
        except BaseException:
            await cls(services, tokenizer_pool).close()
            raise
        return cls(services, tokenizer_pool)

    @property
    def names(self) -> tuple[str, ...]:
        """Every served name, then those of LoRA adapters."""
        loras = [name for service in self.services for name in service.loras.names]
        return (*self._by_name, *loras)

    def find(self, name: str | None) -> AsyncLLM | None:
        """Return the service with a name, its own or that of an adapter, or None if the name is unknown.

        None, "" and `default` select the first service.
        """
        if not name or (name == "default" and name not in self.names):
            return self.services[0]
        return self._by_name.get(name) or next((s for s in self.services if s.loras.find(name)), None)

    def check_names(self) -> None:
        """Raise RejectedError if two models or adapters have the same name."""
        names = self.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise RejectedError(
                f"lora_modules: {twice!r} is the name of another model or adapter; choose another one",
                param="lora_modules",
            )

    async def read_body(self, raw: bytes, model: str | None) -> tuple[Any, InvalidField | None]:
        """Read a large body off the event loop; see `llaisys.body.read_body`."""
        if self._tokenizer_pool is None:
            return await asyncio.to_thread(read_body, raw, model)
        return await self._tokenizer_pool.read_body(raw, model)

    def is_alive(self) -> bool:
        """Return False while any engine is dead."""
        return all(service.is_alive() for service in self.services)

    def is_ready(self) -> bool:
        """Return True while every model accepts requests."""
        return all(service.is_ready() for service in self.services)

    def refusal(self, client_id: str = "") -> QueueFullError | None:
        """Return the error if every model would reject a client's new request now, otherwise None.

        It is the error of the model with the shortest `retry_after_s`.
        """
        refusals = [service.refusal(client_id) for service in self.services]
        known = [each for each in refusals if each is not None]
        return min(known, key=lambda each: each.retry_after_s) if len(known) == len(refusals) else None

    def is_stuck(self) -> bool:
        """Return True once the watchdog has found an engine stuck; this process should then exit."""
        return any(service.is_stuck() for service in self.services)

    def is_lost(self) -> bool:
        """Return True once any engine is dead and not restarted; the server should then stop."""
        return any(service.is_lost() for service in self.services)

    def beat(self) -> None:
        """Send a heartbeat of the event loop to the watchdogs."""
        for service in self.services:
            service.beat()

    async def close(self, drain_s: float = 0.0) -> None:
        """Close every service concurrently; see `AsyncLLM.close`."""
        await asyncio.gather(*(service.close(drain_s) for service in self.services))
        if self._tokenizer_pool is not None:
            await self._tokenizer_pool.close()
