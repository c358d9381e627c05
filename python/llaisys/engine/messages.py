"""The messages between an EngineClient and its engine, and their encoding for an engine in a child process.

Each message is a tagged struct of plain dataclasses; decoding checks every field. Both processes run the same
package version, which `Start` contains, so messages have no version of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from llaisys import errors
from llaisys.config import KvEventsConfig, SpeculativeConfig
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.grammar import GrammarTokenizer
from llaisys.engine.limits import Limits
from llaisys.engine.memory import WorkerSettings
from llaisys.engine.request import EngineRequest
from llaisys.engine.sessions.manager import SessionReply, SessionRequest
from llaisys.errors import EngineDeadError, LlaisysError, QueueFullError, RejectedError
from llaisys.lora_request import LoRARequest
from llaisys.outputs import RequestId
from llaisys.stats import EngineStats
from llaisys.timeline import Timeline

# --- to the engine ---


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: the model to load and its settings.

    - `log_level`: a numeric level of `logging`.
    - `grammar_tokenizer`: the model's tokenizer for structured outputs. Without it, requests with a grammar
      are rejected.
    - `speculation`: the settings of speculative decoding; None turns it off. `draft_settings`: its second
      model. `kv_events`: the settings of KV events; None turns them off.
    """

    version: str
    settings: WorkerSettings
    limits: Limits
    seed: int
    watchdog_window_s: float
    inbox_max: int
    log_level: int
    grammar_tokenizer: GrammarTokenizer | None = None
    speculation: SpeculativeConfig | None = None
    draft_settings: WorkerSettings | None = None
    kv_events: KvEventsConfig | None = None


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Add a request to the queue."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a request, or only its choice `index`.

    `asked_s`: time of the client's call in `time.monotonic` seconds, a clock that all processes share.
    """

    request_id: RequestId
    index: int | None = None
    asked_s: float = 0.0


class TimelineRequest(msgspec.Struct, frozen=True, tag=True):
    """Request the timelines of a request's choices."""

    call_id: int
    request_id: RequestId


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Remove the cached prefixes that no session pins."""

    call_id: int


class LoadLora(msgspec.Struct, frozen=True, tag=True):
    """Load a LoRA adapter."""

    call_id: int
    lora: LoRARequest


class UnloadLora(msgspec.Struct, frozen=True, tag=True):
    """Unload a LoRA adapter as soon as no open request uses it."""

    call_id: int
    lora_int_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The last message: stop the engine, even if requests are open."""


# --- from the engine ---


class Started(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and requests are accepted.

    `limits`: final; on a GPU, the number of KV cells is known only after loading.
    """

    limits: Limits


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The model could not be loaded; the process ends."""

    error: LlaisysError


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one step, and the engine's stats after it, as in `EngineListener`."""

    outputs: list[EngineOutput]
    stats: EngineStats | None


class TimelineReply(msgspec.Struct, frozen=True, tag=True):
    """The single reply to a TimelineRequest: the timeline of each choice that is still recorded."""

    call_id: int
    timelines: dict[int, Timeline]


class PrefixCacheReset(msgspec.Struct, frozen=True, tag=True):
    """The single reply to a ResetPrefixCache. `is_reset`: False if requests run, and nothing was removed."""

    call_id: int
    is_reset: bool


class LoraReply(msgspec.Struct, frozen=True, tag=True):
    """The single reply to a LoadLora or an UnloadLora. `error`: why the adapter was not loaded."""

    call_id: int
    error: LlaisysError | None = None


class EngineEnded(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended for this reason; no output follows."""

    error: EngineDeadError


# Messages that get one reply with their `call_id`, and the replies that are sent at once.
Call: TypeAlias = SessionRequest | TimelineRequest | ResetPrefixCache | LoadLora | UnloadLora
Reply: TypeAlias = TimelineReply | PrefixCacheReset | LoraReply
ToEngine: TypeAlias = Start | Submit | Cancel | Call | Shutdown
FromEngine: TypeAlias = Started | StartFailed | StepOutputs | SessionReply | Reply | EngineEnded


class _Error(msgspec.Struct, frozen=True):
    """A LlaisysError as plain values. `kind`: its class name."""

    kind: str
    text: str
    param: str | None
    retry_after_s: int | None


def _to_plain(value: Any) -> Any:
    if isinstance(value, LlaisysError):
        retry_after_s = getattr(value, "retry_after_s", None)
        return _Error(type(value).__name__, str(value), value.param, retry_after_s)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent between processes")


def _from_plain(wanted: type, value: Any) -> Any:
    if issubclass(wanted, LlaisysError):
        return _error(msgspec.convert(value, _Error))
    if wanted is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{wanted.__name__} cannot be sent between processes")


def _error(plain: _Error) -> LlaisysError:
    """Rebuild an error of the same class.

    A class that `llaisys.errors` does not define becomes LlaisysError.
    """
    kind = getattr(errors, plain.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, LlaisysError)):
        kind = LlaisysError
    if kind is QueueFullError and plain.retry_after_s is not None:
        return QueueFullError(plain.text, retry_after_s=plain.retry_after_s)
    return kind(plain.text, param=plain.param)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_from_plain)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine, dec_hook=_from_plain)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Encode a message.

    Raises TypeError for a value that is not plain. Raises RejectedError for a value that a request may
    contain but msgpack cannot represent: a lone surrogate in a string, or an integer of more than 64 bits.
    """
    try:
        return _ENCODER.encode(message)
    except (UnicodeEncodeError, OverflowError) as e:
        raise RejectedError(f"the request cannot be sent to the engine process: {e}") from None


def decode_to_engine(raw: bytes) -> ToEngine:
    """Decode one message to an engine. Raises msgspec.DecodeError or LlaisysError for an invalid message."""
    return _TO_ENGINE.decode(raw)


def decode_from_engine(raw: bytes) -> FromEngine:
    """Decode one message from an engine. Raises msgspec.DecodeError for an invalid message."""
    return _FROM_ENGINE.decode(raw)
