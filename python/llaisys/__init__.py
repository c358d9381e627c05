"""LLAISYS: LLM inference and serving.

Names are imported on first use, so that `import llaisys` and `llaisys --help` are fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llaisys.async_llm import AsyncLLM as AsyncLLM
    from llaisys.config import Config as Config
    from llaisys.engine.worker import cuda_info as cuda_info
    from llaisys.llm import LLM as LLM
    from llaisys.outputs import CompletionOutput as CompletionOutput
    from llaisys.outputs import CompletionUsage as CompletionUsage
    from llaisys.outputs import Logprob as Logprob
    from llaisys.outputs import RequestOutput as RequestOutput
    from llaisys.sampling_params import SamplingParams as SamplingParams
    from llaisys.session_info import SessionInfo as SessionInfo

_MODULES = {
    "LLM": "llaisys.llm",
    "AsyncLLM": "llaisys.async_llm",
    "Config": "llaisys.config",
    "cuda_info": "llaisys.engine.worker",
    "CompletionOutput": "llaisys.outputs",
    "CompletionUsage": "llaisys.outputs",
    "Logprob": "llaisys.outputs",
    "RequestOutput": "llaisys.outputs",
    "SamplingParams": "llaisys.sampling_params",
    "SessionInfo": "llaisys.session_info",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
