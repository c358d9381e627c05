"""LLAISYS: LLM inference and serving.

The names below are loaded when first used, so that `import llaisys` and `llaisys --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llaisys.config import Config as Config
    from llaisys.engine.worker import cuda_info as cuda_info
    from llaisys.llm import LLM as LLM
    from llaisys.service import AsyncLLM as AsyncLLM
    from llaisys.types import CompletionOutput as CompletionOutput
    from llaisys.types import CompletionUsage as CompletionUsage
    from llaisys.types import Logprob as Logprob
    from llaisys.types import RequestOutput as RequestOutput
    from llaisys.types import SamplingParams as SamplingParams
    from llaisys.types import SessionInfo as SessionInfo

_HOMES = {
    "LLM": "llaisys.llm",
    "AsyncLLM": "llaisys.service",
    "Config": "llaisys.config",
    "cuda_info": "llaisys.engine.worker",
    "CompletionOutput": "llaisys.types",
    "CompletionUsage": "llaisys.types",
    "Logprob": "llaisys.types",
    "RequestOutput": "llaisys.types",
    "SamplingParams": "llaisys.types",
    "SessionInfo": "llaisys.types",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
