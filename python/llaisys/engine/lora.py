"""LoraManager: the LoRA adapters that an engine has loaded, and the requests that use them. Engine thread
only.

K and V depend on the adapter. So the salt of a request's cached prefixes contains the hash of the adapter's
contents: prefix cache, disk tier, sessions and indexes of outputs never mix adapters. The hash, not the name,
because an adapter may be unloaded, changed and loaded again under its name.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Protocol

from llaisys.engine.messages import LoadLora, LoraReply, UnloadLora
from llaisys.engine.request import BrokenInvariant, EngineRequest
from llaisys.engine.sessions.file import ADAPTER_NAME_CHARS, Adapter
from llaisys.errors import EngineDeadError, ExhaustedError, LlaisysError, RejectedError
from llaisys.lora_request import LoRARequest

# No other salt begins with this: one that begins with NUL gets another NUL.
_MARK = "\0lora:"
_HASH_CHARS = 32


class LoraLoader(Protocol):
    """Loads adapters into slots of the core; see `Worker`."""

    def load_lora(self, path: str) -> tuple[int, str]:
        """Load the adapter of a folder or a GGUF file; return its slot and the hash of its contents."""

    def unload_lora(self, slot: int) -> None:
        """Unload the adapter in a slot."""


@dataclass(slots=True, eq=False)
class LoadedLora:
    """One loaded adapter.

    - `slot`: its number in the core. `hash`: of everything that it adds to K and V.
    - `n_open`: open choices that use it. `is_unloading`: it is unloaded when the last of them ends.
    """

    request: LoRARequest
    slot: int
    hash: str
    n_open: int = 0
    is_unloading: bool = False


class LoraManager:
    """The loaded adapters by `lora_int_id`, the least recently used first.

    An adapter is loaded by `load`, or by the first request that uses it after the engine was restarted. An
    adapter without open requests gives its slot to another one when none is free.
    """

    def __init__(self, loader: LoraLoader, max_loras: int) -> None:
        self._loader, self._max = loader, max_loras
        self._loaded: OrderedDict[int, LoadedLora] = OrderedDict()

    def load(self, request: LoRARequest) -> LoadedLora:
        """Load an adapter unless it is loaded. Raises the core's errors, or ExhaustedError (slots)."""
        lora = self._loaded.get(request.lora_int_id)
        if lora is None:
            if len(self._loaded) >= self._max:
                self._unload_idle()
            slot, digest = self._loader.load_lora(request.lora_path)
            lora = self._loaded[request.lora_int_id] = LoadedLora(request, slot, digest)
        self._loaded.move_to_end(request.lora_int_id)
        return lora

    def handle(self, message: LoadLora | UnloadLora) -> LoraReply:
        """Carry out a client's call. Raises EngineDeadError."""
        try:
            match message:
                case LoadLora(lora=lora):
                    self.load(lora)
                case UnloadLora(lora_int_id=lora_int_id):
                    self.unload(lora_int_id)
        except EngineDeadError:
            raise
        except LlaisysError as error:
            return LoraReply(message.call_id, error)
        return LoraReply(message.call_id)

    def unload(self, lora_int_id: int) -> None:
        """Unload an adapter when its last open request has ended. An unknown one is ignored."""
        lora = self._loaded.get(lora_int_id)
        if lora is not None:
            lora.is_unloading = True
            self._settle(lora)

    def acquire(self, source: EngineRequest) -> LoadedLora | None:
        """Return the adapter of a request, loaded, in use by its choices until `release`; None without.

        Raises the errors of `load`.
        """
        if source.lora is None:
            return None
        lora = self.load(source.lora)
        lora.n_open += source.params.n
        return lora

    def release(self, lora: LoadedLora | None, n_choices: int = 1) -> None:
        """End the use of an adapter by some choices."""
        if lora is not None:
            lora.n_open -= n_choices
            self._settle(lora)

    def with_hash(self, digest: str) -> LoadedLora | None:
        """Return the loaded adapter with these contents."""
        return next((lora for lora in self._loaded.values() if lora.hash == digest), None)

    def adapter_of(self, salt: str) -> Adapter:
        """Return the adapter in a salt. One that is no longer loaded has no name."""
        request = self.request_of(salt)
        return Adapter(hash_in(salt), "" if request is None else request.lora_name[:ADAPTER_NAME_CHARS])

    def request_of(self, salt: str) -> LoRARequest | None:
        """Return the request of the loaded adapter in a salt."""
        lora = self.with_hash(hash_in(salt))
        return None if lora is None else lora.request

    def salt_of(self, salt: str, adapter: Adapter) -> str:
        """Return the salt that contains an adapter of `adapter_of`. Raises RejectedError unless it is
        loaded."""
        if adapter.hash and self.with_hash(adapter.hash) is None:
            name = repr(adapter.name) if adapter.name else "without a name"
            raise RejectedError(
                f"the saved session was computed with the LoRA adapter {name}, and no loaded adapter has its "
                "contents; load the adapter first",
                param="file",
            )
        return salted(salt, adapter.hash)

    def check(self, n_open: int) -> None:
        """Verify that `n_open` open choices use adapters. Raises BrokenInvariant."""
        counted = sum(lora.n_open for lora in self._loaded.values())
        if counted != n_open:
            raise BrokenInvariant(f"adapters count {counted} open choices, {n_open} use one")

    def _unload_idle(self) -> None:
        """Unload the least recently used adapter without open requests. Raises ExhaustedError."""
        idle = next((lora for lora in self._loaded.values() if not lora.n_open), None)
        if idle is None:
            raise ExhaustedError(
                f"open requests use {len(self._loaded)} LoRA adapters, which is the limit (max_loras); try "
                "later, or raise max_loras"
            )
        idle.is_unloading = True
        self._settle(idle)

    def _settle(self, lora: LoadedLora) -> None:
        if lora.is_unloading and not lora.n_open:
            del self._loaded[lora.request.lora_int_id]
            self._loader.unload_lora(lora.slot)


def salted(salt: str, digest: str) -> str:
    """Return the salt of prefixes computed with the adapter of this hash; "" is no adapter."""
    if digest:
        return f"{_MARK}{digest}{salt}"
    return f"\0{salt}" if salt.startswith("\0") else salt


def hash_in(salt: str) -> str:
    """Return the hash in a salt of `salted`; "" if it has none."""
    return salt[len(_MARK) :][:_HASH_CHARS] if salt.startswith(_MARK) else ""


def with_salt(source: EngineRequest, lora: LoadedLora | None) -> EngineRequest:
    """Return a request whose salt contains its adapter."""
    salt = salted(source.cache_salt, "" if lora is None else lora.hash)
    return source if salt == source.cache_salt else replace(source, cache_salt=salt)
