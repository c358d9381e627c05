"""The messages between a client and its engine, and their bytes where the engine is in its own process.

Each is a tagged struct of plain dataclasses, checked field by field when it is read. Both ends are of one
package version, which `Start` carries, so there is no other versioning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from llaisys import errors
from llaisys.engine.grammar import GrammarTokens
from llaisys.engine.limits import Limits
from llaisys.engine.outputs import EngineOutput
from llaisys.engine.request import EngineRequest
from llaisys.engine.sessions import SessionAnswer, SessionCall
from llaisys.engine.settings import WorkerSettings
from llaisys.errors import EngineDeadError, LlaisysError, QueueFullError, RejectedError
from llaisys.stats import EngineStats
from llaisys.story import Story
from llaisys.types import RequestId

# --- to the engine ---


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to load. `log_level`: a number of `logging`. `grammar_tokens`: for grammars."""

    version: str
    settings: WorkerSettings
    limits: Limits
    seed: int
    watchdog_window_s: float
    inbox_max: int
    log_level: int
    grammar_tokens: GrammarTokens | None = None


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request to take."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """A request whose client has gone, or one choice of it that nobody reads any more. `asked_s`: when, of
    `time.monotonic`, which the processes of a machine share."""

    request_id: RequestId
    index: int | None = None
    asked_s: float = 0.0


class Ask(msgspec.Struct, frozen=True, tag=True):
    """What a client wants of its sessions."""

    call: SessionCall


class Recall(msgspec.Struct, frozen=True, tag=True):
    """Where did this request's time go?"""

    call_id: int
    request_id: RequestId


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The last message: end, whatever is open."""


# --- from the engine ---


class Started(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; requests are welcome. `limits`: the engine's, which only knows here how many cells
    there are on a GPU."""

    limits: Limits


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The model could not be loaded; the process ends."""

    error: LlaisysError


class Step(msgspec.Struct, frozen=True, tag=True):
    """What one step gave, and the books after it."""

    outputs: list[EngineOutput]
    stats: EngineStats


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The one answer to an Ask."""

    answer: SessionAnswer


class Recalled(msgspec.Struct, frozen=True, tag=True):
    """The one answer to a Recall: the story of each choice that is known."""

    call_id: int
    stories: dict[int, Story]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The engine is over, for this reason; no output follows."""

    error: EngineDeadError


ToEngine: TypeAlias = Start | Submit | Cancel | Ask | Recall | Shutdown
FromEngine: TypeAlias = Started | Refused | Step | Answer | Recalled | Ended


class _Error(msgspec.Struct, frozen=True):
    """An exception of ours. `kind`: its class's name."""

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
    raise TypeError(f"{type(value).__name__} has no form on the wire")


def _from_plain(wanted: type, value: Any) -> Any:
    if issubclass(wanted, LlaisysError):
        return _error(msgspec.convert(value, _Error))
    if wanted is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{wanted.__name__} has no form on the wire")


def _error(plain: _Error) -> LlaisysError:
    """The same class again; one that is not of `llaisys.errors` becomes its plain base."""
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
    """A message as bytes.

    Raises TypeError for a value that is not plain, RejectedError for one that a request may bring and msgpack
    does not have: a lone surrogate in a text, an integer beyond 64 bits.
    """
    try:
        return _ENCODER.encode(message)
    except (UnicodeEncodeError, OverflowError) as e:
        raise RejectedError(f"what holds this cannot go to the engine process: {e}") from None


def decode_to_engine(raw: bytes) -> ToEngine:
    """Raises msgspec.DecodeError or LlaisysError for anything but a whole message to an engine."""
    return _TO_ENGINE.decode(raw)


def decode_from_engine(raw: bytes) -> FromEngine:
    """Raises msgspec.DecodeError for anything but a whole message from an engine."""
    return _FROM_ENGINE.decode(raw)
