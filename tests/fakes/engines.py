"""An engine on a fake context, which is checked after every step and collects the outputs of each choice."""

from __future__ import annotations

from typing import Any

from fakes import core
from fakes.asks import ask, limits
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.executor import Executor
from llaisys.engine.grammar import GrammarCompiler
from llaisys.engine.limits import Limits
from llaisys.engine.worker import Worker
from llaisys.outputs import FinishReason, RequestId

NOW = 1000.0


class Engine:
    """Keys of `tokens` and `ends` are request ids, or (request id, index) for choices after the first."""

    def __init__(
        self,
        seed: int = 0,
        bounds: Limits | None = None,
        window: int | None = None,
        grammars: GrammarCompiler | None = None,
        **changes: Any,
    ) -> None:
        bounds = bounds or limits(**changes)
        self.context = core.Context(
            "fake",
            n_cells=bounds.n_cells,
            n_seq_max=bounds.max_num_seqs,
            max_model_len=bounds.max_model_len,
            n_streams=bounds.n_streams,
            attention_window=window,
        )
        worker = Worker(self.context, core.SamplerSpec, bounds.n_streams)  # type: ignore[arg-type]
        self.engine = LLMEngine(Executor(worker), bounds, seed, grammars)
        self.tokens: dict[Any, list[int]] = {}
        self.ends: dict[Any, EngineOutput] = {}
        self.cached: dict[RequestId, int] = {}
        self.over: set[RequestId] = set()

    def submit(self, *names: str, **changes: Any) -> None:
        for name in names:
            self.engine.submit(ask(name, **changes))

    def step(self, n: int = 1, now_s: float = NOW) -> None:
        for _ in range(n):
            for output in self.engine.step(now_s):
                name = output.request_id
                key = (name, output.index) if output.index else name
                assert key not in self.ends, "an output after the choice's end"
                assert name not in self.over, "an output after the last"
                self.tokens.setdefault(key, []).extend(output.new_token_ids)
                self.cached[name] = max(self.cached.get(name, 0), output.num_cached_tokens)
                if output.finish_reason is not None:
                    self.ends[key] = output
                if output.last:
                    assert output.finish_reason is not None
                    self.over.add(name)
            self.engine.check()

    def reasons(self) -> dict[Any, FinishReason | None]:
        return {name: end.finish_reason for name, end in self.ends.items()}

    def finish(self) -> None:
        while self.engine.has_work():
            self.step()
        stats = self.engine.stats()
        assert self.context.n_cells_free == stats.kv_cells_free
        assert stats.kv_cells_used == stats.kv_cells_session
        assert stats.kv_cells_free + stats.kv_cells_retained == stats.kv_cells
        assert self.context.n_seq_free == self.engine.limits.max_num_seqs
        assert {key if isinstance(key, str) else key[0] for key in self.ends} == self.over


# Engines of the running test, whose threads for grammars `tests/unit/engine/conftest.py` ends.
GRAMMAR_ENGINES: list[Engine] = []


def grammar_engine(grammars: GrammarCompiler | None, **changes: Any) -> Engine:
    """Return an engine that is closed at the end of the test."""
    GRAMMAR_ENGINES.append(Engine(grammars=grammars, **changes))
    return GRAMMAR_ENGINES[-1]
