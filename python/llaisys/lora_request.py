"""LoRARequest: names a LoRA adapter and the folder or the file that it is loaded from."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from llaisys.errors import RejectedError

LORA_NAME_MAX = 256
_KNOWN_MAX = 1024


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for requests, as in vLLM.

    - `lora_name`: its name. `lora_path`: a folder in PEFT's format, or a GGUF file.
    - `lora_int_id`: vLLM's number of the adapter, which the engine replaces with its own. Requests with the
      same name, number and path use the same loaded adapter, even if the folder has changed since.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""

    def check(self) -> None:
        """Raise RejectedError for an empty or long name, and without a path."""
        if not 0 < len(self.lora_name) <= LORA_NAME_MAX:
            raise RejectedError(
                f"lora_name has {len(self.lora_name)} characters, allowed are 1 to {LORA_NAME_MAX}",
                param="lora_name",
            )
        if not self.lora_path:
            raise RejectedError(
                f"lora_path of {self.lora_name!r} is empty; pass the adapter's folder or GGUF file",
                param="lora_path",
            )


LorasOrOne: TypeAlias = "LoRARequest | Sequence[LoRARequest | None] | None"


def loras_of(given: LorasOrOne, n_prompts: int) -> Sequence[LoRARequest | None]:
    """Return one adapter or None per prompt. Raises RejectedError."""
    loras = [given] * n_prompts if given is None or isinstance(given, LoRARequest) else given
    if len(loras) != n_prompts:
        raise RejectedError(
            f"{n_prompts} prompts and {len(loras)} lora_request: pass one for all, or one per prompt",
            param="lora_request",
        )
    return loras


class LoraNumbers:
    """Numbers adapters for an engine: equal requests get the same number, and no number is used twice."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._known: OrderedDict[LoRARequest, LoRARequest] = OrderedDict()

    def find(self, request: LoRARequest) -> LoRARequest | None:
        """Return the numbered request equal to this one; None if it has no number yet."""
        return self._known.get(request)

    def new(self, request: LoRARequest) -> LoRARequest:
        """Return the request with a new number."""
        return replace(request, lora_int_id=next(self._numbers))

    def keep(self, request: LoRARequest, numbered: LoRARequest) -> None:
        """Let `find` return a numbered request, for the newest `_KNOWN_MAX` of them."""
        self._known[request] = numbered
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
