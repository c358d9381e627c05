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
    from llaisys.errors import ContextLengthError as ContextLengthError
    from llaisys.errors import CoreFaultError as CoreFaultError
    from llaisys.errors import EngineDeadError as EngineDeadError
    from llaisys.errors import ExhaustedError as ExhaustedError
    from llaisys.errors import InvariantError as InvariantError
    from llaisys.errors import LlaisysError as LlaisysError
    from llaisys.errors import NotFoundError as NotFoundError
    from llaisys.errors import QueueFullError as QueueFullError
    from llaisys.errors import RejectedError as RejectedError
    from llaisys.errors import RequestFailedError as RequestFailedError
    from llaisys.errors import RequestTimeoutError as RequestTimeoutError
    from llaisys.errors import SlowReaderError as SlowReaderError
    from llaisys.errors import StorageBusyError as StorageBusyError
    from llaisys.errors import StorageError as StorageError
    from llaisys.errors import StorageFullError as StorageFullError
    from llaisys.errors import UnsupportedError as UnsupportedError
    from llaisys.llm import LLM as LLM
    from llaisys.lora_request import LoRARequest as LoRARequest
    from llaisys.model_tokenizer import ModelTokenizer as ModelTokenizer
    from llaisys.outputs import CompletionOutput as CompletionOutput
    from llaisys.outputs import CompletionUsage as CompletionUsage
    from llaisys.outputs import EmbeddingOutput as EmbeddingOutput
    from llaisys.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from llaisys.outputs import FinishReason as FinishReason
    from llaisys.outputs import Logprob as Logprob
    from llaisys.outputs import PoolingOutput as PoolingOutput
    from llaisys.outputs import PoolingRequestOutput as PoolingRequestOutput
    from llaisys.outputs import RequestOutput as RequestOutput
    from llaisys.outputs import RequestStateStats as RequestStateStats
    from llaisys.outputs import ScoringOutput as ScoringOutput
    from llaisys.outputs import ScoringRequestOutput as ScoringRequestOutput
    from llaisys.pooling_params import PoolingParams as PoolingParams
    from llaisys.sampling_params import RequestOutputKind as RequestOutputKind
    from llaisys.sampling_params import SamplingParams as SamplingParams
    from llaisys.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from llaisys.session_info import SessionInfo as SessionInfo

_MODULES = {
    "LLM": "llaisys.llm",
    "AsyncLLM": "llaisys.async_llm",
    "Config": "llaisys.config",
    "cuda_info": "llaisys.engine.worker",
    "LoRARequest": "llaisys.lora_request",
    "ModelTokenizer": "llaisys.model_tokenizer",
    "CompletionOutput": "llaisys.outputs",
    "CompletionUsage": "llaisys.outputs",
    "EmbeddingOutput": "llaisys.outputs",
    "EmbeddingRequestOutput": "llaisys.outputs",
    "FinishReason": "llaisys.outputs",
    "Logprob": "llaisys.outputs",
    "PoolingOutput": "llaisys.outputs",
    "PoolingRequestOutput": "llaisys.outputs",
    "RequestOutput": "llaisys.outputs",
    "RequestStateStats": "llaisys.outputs",
    "ScoringOutput": "llaisys.outputs",
    "ScoringRequestOutput": "llaisys.outputs",
    "PoolingParams": "llaisys.pooling_params",
    "RequestOutputKind": "llaisys.sampling_params",
    "SamplingParams": "llaisys.sampling_params",
    "StructuredOutputsParams": "llaisys.sampling_params",
    "SessionInfo": "llaisys.session_info",
    "ContextLengthError": "llaisys.errors",
    "CoreFaultError": "llaisys.errors",
    "EngineDeadError": "llaisys.errors",
    "ExhaustedError": "llaisys.errors",
    "InvariantError": "llaisys.errors",
    "LlaisysError": "llaisys.errors",
    "NotFoundError": "llaisys.errors",
    "QueueFullError": "llaisys.errors",
    "RejectedError": "llaisys.errors",
    "RequestFailedError": "llaisys.errors",
    "RequestTimeoutError": "llaisys.errors",
    "SlowReaderError": "llaisys.errors",
    "StorageBusyError": "llaisys.errors",
    "StorageError": "llaisys.errors",
    "StorageFullError": "llaisys.errors",
    "UnsupportedError": "llaisys.errors",
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
