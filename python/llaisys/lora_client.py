"""LoraClient: the LoRA adapters that a model serves by name (`AsyncLLM.loras`)."""

from __future__ import annotations

import asyncio

from llaisys.config import Config
from llaisys.errors import ExhaustedError, NotFoundError, RejectedError, UnsupportedError
from llaisys.lazy_engine import LazyEngine
from llaisys.lora_request import LoraNumbers, LoRARequest


class LoraClient:
    """Loads and unloads adapters; event loop only.

    A name belongs to an adapter from the end of `load` to the begin of `unload`. Requests that run then
    continue; the engine unloads the adapter after the last of them. An engine that was restarted loads an
    adapter again for the first request that uses it.
    """

    def __init__(self, engine: LazyEngine, config: Config) -> None:
        """Serve the names of the configured adapters, which `load_configured` loads."""
        self._engine, self._max = engine, config.max_loras if config.enable_lora else 0
        self._numbers = LoraNumbers()
        self._by_name: dict[str, LoRARequest] = {}
        self._loading: set[str] = set()
        self._configured = config.lora_modules
        for module in self._configured:
            request = LoRARequest(module.name, lora_path=module.path)
            self._by_name[module.name] = self._numbers.new(request)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all adapters."""
        return tuple(self._by_name)

    def find(self, name: str | None) -> LoRARequest | None:
        """Return the adapter with a name."""
        return self._by_name.get(name or "")

    def resolve(self, request: LoRARequest | None) -> LoRARequest | None:
        """Return an adapter with its number in the engine, which loads it if needed.

        Raises UnsupportedError if LoRA is off, or RejectedError.
        """
        if request is None or request in self._by_name.values():
            return request
        if not self._max:
            raise UnsupportedError("LoRA is off; set enable_lora", param="lora_request")
        request.check()
        known = self._numbers.find(request)
        if known is None:
            known = self._numbers.new(request)
            self._numbers.keep(request, known)
        return known

    async def load_configured(self) -> None:
        """Load the adapters of the configuration into the loaded engine, once.

        Raises RejectedError or UnsupportedError naming the adapter, after closing the engine.
        """
        modules, self._configured = self._configured, ()
        for module in modules:
            try:
                await self._load(self._by_name[module.name])
            except (RejectedError, UnsupportedError) as e:
                await self._engine.close()
                raise type(e)(f"lora_modules: {module.name}: {e}", param="lora_modules") from e

    async def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load an adapter and serve it as `name`. `in_place`: replace an adapter of this name.

        Raises RejectedError (its name, a damaged adapter), UnsupportedError, ExhaustedError (max_loras) or
        EngineDeadError.
        """
        request = LoRARequest(name, lora_path=path)
        request.check()
        if not self._max:
            raise UnsupportedError("LoRA is off; start the server with --enable-lora", param="lora_name")
        old = self._by_name.get(name)
        if name in self._loading or (old is not None and not in_place):
            raise RejectedError(
                f"The lora adapter {name!r} has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
                param="lora_name",
            )
        if old is None and len(self._by_name) + len(self._loading) >= self._max:
            raise ExhaustedError(
                f"{self._max} LoRA adapters are loaded, which is the limit (max_loras); unload one first"
            )
        numbered = self._numbers.new(request)
        self._loading.add(name)
        try:
            await self._load(numbered)
            self._by_name[name] = numbered
        finally:
            self._loading.discard(name)
        if old is not None:
            await self._unload(old)

    async def unload(self, name: str) -> None:
        """Refuse new requests of an adapter, and unload it when none is open. Raises NotFoundError."""
        old = self._by_name.pop(name, None)
        if old is None:
            raise NotFoundError(f"The lora adapter {name!r} cannot be found.", param="lora_name")
        await self._unload(old)

    async def _load(self, numbered: LoRARequest) -> None:
        with self._engine.acquired():
            client = await self._engine.get()
            await asyncio.wrap_future(client.load_lora(numbered))

    async def _unload(self, numbered: LoRARequest) -> None:
        if self._engine.client is not None:
            with self._engine.acquired():
                await asyncio.wrap_future(self._engine.client.unload_lora(numbered.lora_int_id))
