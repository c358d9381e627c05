"""The engine of encoders on a scripted encoder: whole texts in each step, order, limits, and failures."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fakes.asks import ask, limits
from llaisys.engine.encoder_engine import EncoderEngine
from llaisys.engine.encoder_worker import EncoderWorker
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.limits import Limits
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.errors import (
    ContextLengthError,
    EngineDeadError,
    QueueFullError,
    RejectedError,
    RequestTimeoutError,
    UnsupportedError,
)
from llaisys.outputs import FinishReason

NOW = 1000.0
BAD, DEADLY, NON_FINITE = 98, 99, 97


class FakeEncoder:
    """The hidden state of a row is [token, type, length of its text]; the score is the sum of the tokens."""

    isa, weight_bytes = "fake", 0

    def __init__(self, has_head: bool) -> None:
        self.calls: list[list[int]] = []
        self._has_head = has_head
        self.is_closed = False

    def encode(
        self, tokens: NDArray[np.int32], types: NDArray[np.int32], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        assert (tokens.dtype, types.dtype, lengths.dtype) == (np.int32, np.int32, np.int64)
        assert len(tokens) == len(types) == lengths.sum()
        self.calls.append(lengths.tolist())
        if BAD in tokens:
            raise RejectedError("a token is bad")
        if DEADLY in tokens:
            raise EngineDeadError("the core is dead")
        values = np.where(tokens == NON_FINITE, np.nan, tokens)
        hidden = np.stack([values, types, np.repeat(lengths, lengths)], axis=1).astype(np.float32)
        sums = [part.sum() for part in np.split(values, np.cumsum(lengths)[:-1])]
        return hidden, np.array(sums, np.float32) if self._has_head else None

    def close(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self, bounds: Limits | None = None, *, has_head: bool = False, **changes: Any) -> None:
        self.fake = FakeEncoder(has_head)
        worker = EncoderWorker(self.fake)  # type: ignore[arg-type]  # the fake has its methods
        self.engine = EncoderEngine(worker, bounds or limits(**changes))
        self.ends: dict[str, EngineOutput] = {}

    def submit(self, *names: str, **changes: Any) -> None:
        for name in names:
            self.engine.submit(ask(name, **{"pooling": "last", "normalize": False, **changes}))

    def step(self, now_s: float = NOW) -> list[str]:
        outputs = self.engine.step(now_s)
        for output in outputs:
            assert output.request_id not in self.ends, "a second output"
            assert output.last
            assert output.finish_reason is not None
            self.ends[output.request_id] = output
        self.engine.check()
        return [output.request_id for output in outputs]

    def finish(self) -> None:
        while self.engine.has_work():
            self.step()

    def vector(self, name: str) -> list[float]:
        embedding = self.ends[name].embedding
        assert embedding is not None
        return np.frombuffer(embedding, "<f4").tolist()


def test_a_step_computes_whole_texts_up_to_its_tokens() -> None:
    rig = Rig(max_num_batched_tokens=10, max_model_len=10)
    for name, n in (("a", 4), ("b", 6), ("c", 1), ("d", 10), ("e", 2)):
        rig.submit(name, prompt=[*range(1, n + 1)])
    assert [rig.step() for _ in range(4)] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert rig.fake.calls == [[4, 6], [1], [10], [2]]
    assert rig.vector("b") == [6, 0, 6]
    assert not rig.engine.has_work()
    stats = rig.engine.stats()
    assert (stats.num_submitted, stats.num_running, stats.kv_cells, stats.finished) == (5, 0, 0, {"stop": 5})


def test_a_step_has_at_most_max_num_seqs_texts() -> None:
    rig = Rig(max_num_seqs=2)
    rig.submit("a", "b", "c")
    assert [rig.step(), rig.step()] == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("pooling", "want"),
    [("mean", [2, 0, 3]), ("cls", [3, 0, 3]), ("last", [2, 0, 3]), ("max", [3, 0, 3])],
)
def test_pooling(pooling: str, want: list[float]) -> None:
    rig = Rig()
    rig.submit("a", prompt=[3, 1, 2], pooling=pooling)
    rig.finish()
    assert rig.vector("a") == want
    rig.submit("b", prompt=[3, 1, 2], pooling=pooling, normalize=True)
    rig.finish()
    assert np.linalg.norm(rig.vector("b")) == pytest.approx(1)


def test_scores_are_logits_or_their_sigmoid() -> None:
    rig = Rig(has_head=True)
    rig.submit("raw", prompt=[1, 2], pooling="score")
    rig.submit("one", prompt=[1, 2], pooling="score", normalize=True)
    rig.finish()
    assert rig.ends["raw"].score == 3.0
    assert rig.ends["one"].score == pytest.approx(1 / (1 + np.exp(-3.0)))


def test_the_second_text_of_a_pair_has_another_type() -> None:
    rig = Rig()
    rig.submit("a", prompt=[1, 2, 3, 4], pooling="mean", second_segment=3)
    rig.finish()
    assert rig.vector("a") == [2.5, 0.25, 4]


def test_priority_then_arrival_and_a_share_for_each_client() -> None:
    rig = Rig(max_num_batched_tokens=3, max_model_len=3)
    rig.submit("late", priority=1)
    rig.submit("a1", "a2", "a3", client_id="a")
    rig.submit("b1", client_id="b")
    order = [name for _ in range(5) for name in rig.step()]
    assert order[-1] == "late"
    assert order.index("b1") < order.index("a3")


def test_a_faulty_text_fails_alone() -> None:
    rig = Rig()
    rig.submit("a", "b")
    rig.submit("bad", prompt=[1, BAD])
    rig.submit("nan", prompt=[NON_FINITE])
    rig.submit("c")
    rig.finish()
    reasons = {name: end.finish_reason for name, end in rig.ends.items()}
    stop, error = FinishReason.STOP, FinishReason.ERROR
    assert reasons == {"a": stop, "b": stop, "bad": error, "nan": error, "c": stop}
    assert "bad" in str(rig.ends["bad"].error)
    assert "not finite" in str(rig.ends["nan"].error)
    rig.submit("deadly", prompt=[DEADLY])
    with pytest.raises(EngineDeadError):
        rig.engine.step(NOW)


def test_cancel_and_deadline() -> None:
    rig = Rig()
    rig.submit("a", "b")
    assert rig.engine.cancel("a")
    assert not rig.engine.cancel("a")
    assert not rig.engine.cancel("unknown")
    rig.submit("late", deadline_s=NOW + 1)
    assert sorted(rig.step(NOW + 2)) == ["a", "b", "late"]
    assert rig.ends["a"].finish_reason == FinishReason.ABORT
    assert isinstance(rig.ends["late"].error, RequestTimeoutError)
    assert rig.fake.calls == [[3]]


def test_rejections_have_no_side_effects() -> None:
    rig = Rig(max_model_len=4, max_num_queued_reqs=1, max_num_seqs=1)
    with pytest.raises(UnsupportedError, match="generates no text"):
        rig.submit("x", pooling=None)
    with pytest.raises(ContextLengthError):
        rig.submit("x", prompt=[1] * 5)
    with pytest.raises(RejectedError, match="token id"):
        rig.submit("x", prompt=[10**6])
    rig.submit("a")
    with pytest.raises(RejectedError, match="in use"):
        rig.submit("a")
    rig.submit("b")
    with pytest.raises(QueueFullError):
        rig.submit("c")
    rig.finish()
    assert rig.ends.keys() == {"a", "b"}


def test_sessions_are_refused_and_the_rest_of_the_surface() -> None:
    rig = Rig()
    sessions = rig.engine.session_requests
    sessions.handle(SessionRequest(call_id=7, kind="list"))
    (reply,) = sessions.pop_replies()
    assert (reply.call_id, reply.sessions) == (7, [])
    assert isinstance(reply.error, UnsupportedError)
    assert sessions.pop_replies() == []
    assert rig.engine.reset_prefix_cache()
    assert rig.engine.wait_s() is None
    rig.submit("a")
    assert rig.engine.wait_s() == 0.0
    rig.finish()
    assert rig.engine.timelines("a", NOW).keys() == {0}
    rig.engine.close()
    assert rig.fake.is_closed


@pytest.mark.parametrize("seed", range(5))
def test_random_requests_end_exactly_once(seed: int) -> None:
    draw = random.Random(seed)
    rig = Rig(max_num_batched_tokens=16, max_model_len=16, max_num_seqs=4, max_num_queued_reqs=64)
    submitted = set()
    for i in range(60):
        name = f"r{i}"
        prompt = [draw.randrange(1, 90) for _ in range(draw.randrange(1, 17))]
        prompt[-1] = draw.choice([prompt[-1]] * 5 + [BAD])
        try:
            rig.submit(name, prompt=prompt, priority=draw.randrange(3), client_id=draw.choice("ab"))
            submitted.add(name)
        except QueueFullError:
            pass
        if draw.random() < 0.2:
            rig.engine.cancel(draw.choice(sorted(submitted)))
        if draw.random() < 0.4:
            rig.step()
    rig.finish()
    assert rig.ends.keys() == submitted
    for name, end in rig.ends.items():
        assert end.finish_reason in (FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR), name
    assert all(sum(call) <= 16 for call in rig.fake.calls)
