"""Messages between client and engine: they survive encoding unchanged, and invalid ones are rejected."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.asks import ask, limits
from llaisys import errors
from llaisys.config import SpeculativeConfig
from llaisys.engine.engine_output import EngineOutput, TokenLogprobs
from llaisys.engine.memory import GpuSettings, WorkerSettings
from llaisys.engine.messages import (
    Cancel,
    EngineEnded,
    FromEngine,
    PrefixCacheReset,
    ResetPrefixCache,
    Shutdown,
    Start,
    Started,
    StartFailed,
    StepOutputs,
    Submit,
    TimelineReply,
    TimelineRequest,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from llaisys.engine.sessions.manager import SessionReply, SessionRequest
from llaisys.outputs import FinishReason
from llaisys.sampling_params import RequestOutputKind
from llaisys.session_info import SessionInfo
from llaisys.stats import EngineStats, HistogramData
from llaisys.timeline import Span, SpanKind, Timeline

SETTINGS = WorkerSettings(
    path=Path("/a/model"),
    dtype="auto",
    kv_dtype="bfloat16",
    isa="auto",
    n_cells=256,
    n_seq_max=4,
    n_batch=16,
    max_model_len=64,
    n_threads=2,
    gpu=GpuSettings(ordinal=1, memory_share=0.5, synchronous=True, overlap=False),
)
STATS = EngineStats(
    num_running=3,
    kv_cells=9,
    tokens_of_steps=HistogramData((1.0, 8.0), (1, 2, 3), 20.0),
    waiting_by_reason={"capacity": 1},
)
OUTPUT = EngineOutput(
    "a",
    [1, 2],
    [TokenLogprobs(1, -math.inf, 1, [(1, -0.5)])],
    FinishReason.LENGTH,
    7,
    num_cached_tokens=3,
    queued_s=0.5,
)
TIMELINE = Timeline(
    1.0, 3.0, (Span(1.0, 3.0, SpanKind.QUEUED, ("b", ("c", 2))),), {SpanKind.QUEUED: 2.0}, is_over=True
)
SCORED = EngineOutput("a", [1], new_prompt_logprobs=[TokenLogprobs(4, -2.5, 3, [(5, -0.5)])])


@pytest.mark.parametrize(
    "message",
    [
        Start("1", SETTINGS, limits(session_store=Path("/a/store")), 2**63 - 1, 30.0, 30, 20),
        Submit(
            ask(deadline_s=math.inf, logit_bias={3: 1.5}, seed=-7, logprobs=2, client_id="k", priority=-1)
        ),
        Start("1", SETTINGS, limits(), 0, 30.0, 30, 20, speculation=SpeculativeConfig(method="suffix")),
        Submit(ask(prediction_token_ids=[1, 2])),
        Submit(ask(allowed_token_ids=[3], bad_words=["a"], bad_word_ids=((1, 2), (3,)), prompt_logprobs=2)),
        Cancel("a"),
        SessionRequest(kind="fork", client_id="k", name="a", other="b", n_tokens=3, call_id=7),
        Submit(ask(logprobs=-1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)),
        TimelineRequest(7, "a"),
        ResetPrefixCache(7),
        Shutdown(),
    ],
)
def test_messages_to_the_engine_survive_encoding(message: ToEngine) -> None:
    assert encode(decode_to_engine(encode(message))) == encode(message)
    assert type(decode_to_engine(encode(message))) is type(message)


@pytest.mark.parametrize(
    "message",
    [
        Started(limits(session_store=Path("/a/store"))),
        StepOutputs([OUTPUT, SCORED], STATS),
        SessionReply(7, [SessionInfo("a", 3, 2, 1, True)]),
        TimelineReply(7, {1: TIMELINE}),
        PrefixCacheReset(7, True),
    ],
)
def test_messages_from_the_engine_survive_encoding(message: FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


def send_error(error: errors.LlaisysError) -> errors.LlaisysError:
    decoded = decode_from_engine(encode(StartFailed(error)))
    assert isinstance(decoded, StartFailed)
    assert type(decoded.error) is type(error)
    assert str(decoded.error) == str(error)
    return decoded.error


CLASSES = [
    each for each in vars(errors).values() if isinstance(each, type) and each.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_keeps_its_class_and_text(kind: type[errors.LlaisysError]) -> None:
    send_error(kind("a message"))


def test_the_error_of_a_session_reply_keeps_its_class() -> None:
    decoded = decode_from_engine(encode(SessionReply(7, [], errors.RejectedError("no such", param="x"))))
    assert isinstance(decoded, SessionReply)
    assert isinstance(decoded.error, errors.RejectedError)
    assert (decoded.call_id, decoded.error.param) == (7, "x")


def test_an_error_keeps_its_fields() -> None:
    assert send_error(errors.ContextLengthError("x", param="prompt")).param == "prompt"
    full = send_error(errors.QueueFullError("x", retry_after_s=7))
    assert isinstance(full, errors.QueueFullError)
    assert full.retry_after_s == 7


def test_an_engine_error_keeps_its_class() -> None:
    decoded = decode_from_engine(encode(EngineEnded(errors.EngineDeadError("a panic"))))
    assert isinstance(decoded, EngineEnded)
    assert isinstance(decoded.error, errors.EngineDeadError)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode({"type": "Nothing"}),
        msgspec.msgpack.encode({"type": "Submit"}),
        encode(Submit(ask(prompt=[1, 2])))[:-3],
        msgspec.msgpack.encode({"type": "Cancel", "request_id": 3}),
        msgspec.msgpack.encode({"type": "SessionRequest", "kind": "burn"}),
        encode(Submit(ask(max_tokens=3))).replace(b"max_tokens\x03", b"max_tokens\x00"),
    ],
)
def test_invalid_messages_are_rejected(raw: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        decode_to_engine(raw)


def test_a_value_that_is_not_plain_data_fails_at_the_sender() -> None:
    with pytest.raises(TypeError, match="object cannot be sent"):
        encode(Submit(ask(prompt=[object()])))  # type: ignore[list-item]


@pytest.mark.parametrize(
    "changes",
    [{"stop": ["\ud800"]}, {"cache_salt": "\ud800"}, {"client_id": "\ud800"}, {"priority": 1 << 64}],
)
def test_values_that_msgpack_cannot_represent_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(errors.RejectedError, match="cannot be sent to the engine process"):
        encode(Submit(ask(**changes)))
