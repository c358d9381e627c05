"""Eight requests that run together, and one after them, for tests that inject faults into the core.

They have prefix hits, a fork, chunked prompts and preemptions.
"""

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
# By name: its step of arrival, the number of tokens shared with `a`, the number of its own.
ARRIVALS = {
    "a": (0, 12, 4),
    "twin": (0, 12, 4),
    "b": (0, 0, 11),
    "two": (1, 0, 9),  # n = 2
    "gone": (1, 0, 4),  # canceled while it runs
    "c": (2, 12, 4),
    "d": (3, 6, 7),
    "f": (2, 0, 3),
    "e": (6, 0, 21),
    "late": (60, 12, 5),  # when all others have ended
}


def bounds(*, prefix: bool, n_streams: int = 1, n_states_kept: int = 0) -> Limits:
    """Return limits with too few cells for all of them, so that some are preempted.

    `n_states_kept`: for a model with recurrent layers.
    """
    return limits(
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_num_queued_reqs=16,
        max_model_len=64,
        n_cells=160,
        vocab_size=VOCAB_SIZE,
        n_streams=n_streams,
        enable_prefix_caching=prefix,
        state_bytes=int(n_states_kept > 0),
        n_states_kept=n_states_kept,
    )


def requests() -> dict[str, EngineRequest]:
    """Return all requests: greedy and sampled, some with logprobs."""
    made = {}
    for i, (name, (_, n_shared, n_own)) in enumerate(ARRIVALS.items()):
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
    """The outputs by (request, choice): tokens with their logprobs, and the last output.

    `n_together`: the highest number of choices that ran at the same time. `stats`: at the end.
    """

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
        """Return the requests with a choice that ended with an error."""
        return {name for (name, _), end in self.ends.items() if end.error is not None}


def context_of(core: ModuleType, limits: Limits, n_ranks: int = 1) -> Any:
    """Return a context of the tiny golden model that reuses cells at once and fills free ones with NaN."""
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
    """Run all requests to their ends, with every check after every step. Raises what ends the engine."""
    answers, todo = Answers(), requests()
    for n in range(STEPS_MAX):
        for name in [name for name in todo if ARRIVALS[name][0] <= n]:
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
        raise AssertionError(f"requests are still open after {STEPS_MAX} steps")
    stats = answers.stats = engine.stats()
    assert sorted(answers.over) == sorted(ARRIVALS), "each request ends once"
    assert stats.num_running == stats.num_waiting == stats.kv_cells_used == 0
    assert context.n_seq_free == engine.limits.max_num_seqs
    assert stats.kv_cells_free + stats.kv_cells_retained == stats.kv_cells
    return answers


def check_answers(answers: Answers, want: Answers) -> None:
    """Check that at most one request failed, and that the others have the outputs of a run without faults."""
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
