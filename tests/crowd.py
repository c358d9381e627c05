"""Eight requests that run together, and one after them: prefix hits, a fork, chunked prompts, preemptions.
For tests that make the core fail while they run."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from fakes.asks import ask, limits
from golden import FOLDER
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.executor import Executor
from llaisys.engine.limits import Limits
from llaisys.engine.request import EngineRequest
from llaisys.engine.worker import Worker
from llaisys.stats import EngineStats

VOCAB_SIZE = 200  # ids below it are plain in the fake and in the golden model
STEP_S, STEPS_MAX, CANCEL_AT = 0.01, 400, 9
# By name: when it comes (in steps), how many tokens it shares with `a`, how many are its own.
COMERS = {
    "a": (0, 12, 4),
    "twin": (0, 12, 4),
    "b": (0, 0, 11),
    "two": (1, 0, 9),  # n = 2
    "gone": (1, 0, 4),  # cancelled while it runs
    "c": (2, 12, 4),
    "d": (3, 6, 7),
    "f": (2, 0, 3),
    "e": (6, 0, 21),
    "late": (60, 12, 5),  # when all others have ended
}


def bounds(*, prefix: bool, n_streams: int = 1) -> Limits:
    """Less room than they need in the end, or they would not be preempted."""
    return limits(
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_num_queued_reqs=16,
        max_model_len=64,
        n_cells=160,
        vocab_size=VOCAB_SIZE,
        n_streams=n_streams,
        enable_prefix_caching=prefix,
    )


def requests() -> dict[str, EngineRequest]:
    """All of them, greedy and drawn, some with logprobs."""
    made = {}
    for i, (name, (_, n_shared, n_own)) in enumerate(COMERS.items()):
        prompt = [(7 * j + 3) % VOCAB_SIZE for j in range(n_shared)]
        prompt += [(11 * j + (0 if name == "twin" else i) * 17 + 5) % VOCAB_SIZE for j in range(n_own)]
        made[name] = ask(
            name,
            prompt,
            n=2 if name == "two" else 1,
            temperature=0.0 if i % 2 == 0 else 1.0,
            seed=i,
            logprobs=1 if i % 3 == 0 else None,
            max_tokens=24 - i,
            eos_token_ids=(),
        )
    return made


@dataclass
class Answers:
    """What came, by (request, choice): tokens with their logprobs, and the end. `n_together`: choices that
    ran at once, at most. `stats`: at the end."""

    tokens: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    ends: dict[tuple[str, int], EngineOutput] = field(default_factory=dict)
    over: list[str] = field(default_factory=list)
    n_together: int = 0
    stats: EngineStats = field(default_factory=EngineStats)

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.ends, "an output after the choice's end"
            assert output.request_id not in self.over, "an output after the last"
            self.tokens.setdefault(key, []).extend(output.new_logprobs or output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[key] = output
            if output.last:
                self.over.append(output.request_id)

    def failed(self) -> set[str]:
        """The requests of which a choice ended with an error."""
        return {name for (name, _), end in self.ends.items() if end.error is not None}


def context_of(core: ModuleType, limits: Limits, n_ranks: int = 1) -> Any:
    """A context of the tiny golden model in which mistakes show: cells are reused at once, and poisoned."""
    return core.Context(
        str(FOLDER),
        dtype="float32",
        n_cells=limits.n_cells,
        n_seq_max=limits.max_num_seqs,
        n_streams=limits.n_streams,
        n_batch=8,
        max_model_len=limits.max_model_len,
        n_threads=1,
        n_ranks=n_ranks,
        lifo=True,
        nan_fill=True,
    )


def make_engine(context: Any, spec: Any, limits: Limits) -> LLMEngine:
    return LLMEngine(Executor(Worker(context, spec, limits.n_streams)), limits, 0)


def run(engine: LLMEngine, context: Any) -> Answers:
    """All of them from arrival to end, with every check after every step. Raises what ends the engine."""
    answers, todo = Answers(), requests()
    for n in range(STEPS_MAX):
        for name in [name for name in todo if COMERS[name][0] <= n]:
            engine.submit(todo.pop(name))
        if n == CANCEL_AT:
            engine.cancel("gone")
        if engine.has_work():
            answers.take(engine.step(1000.0 + n * STEP_S))
            answers.n_together = max(answers.n_together, engine.stats().num_running)
            engine.check()
        elif not todo:
            break
    else:
        raise AssertionError("they do not come to an end")
    stats = answers.stats = engine.stats()
    assert sorted(answers.over) == sorted(COMERS), "each ends once"
    assert stats.num_running == stats.num_waiting == stats.kv_cells_used == 0
    assert context.n_seq_free == engine.limits.max_num_seqs
    assert stats.kv_cells_free + stats.kv_cells_retained == stats.kv_cells
    return answers


def judge(answers: Answers, want: Answers) -> None:
    """At most one request failed; all others were told what they would have been told."""
    failed = answers.failed()
    assert len(failed) <= 1, failed
    for key, tokens in want.tokens.items():
        got = answers.tokens.get(key, [])
        if key[0] in failed:
            assert got == tokens[: len(got)], key
        else:
            n_tokens = min(len(got), len(tokens)) if key[0] == "gone" else None
            assert got[:n_tokens] == tokens[:n_tokens], key
            assert answers.ends[key].finish_reason is want.ends[key].finish_reason
