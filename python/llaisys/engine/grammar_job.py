"""Jobs of a grammar process: trial compiles, for `llaisys.grammar_trials` (see `llaisys.job_process`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llaisys.engine.fair_threads import FairThreads
from llaisys.engine.grammar import Grammars, GrammarTokens, try_grammar
from llaisys.job_process import Jobs
from llaisys.types import StructuredOutputsParams

_GRAMMARS: list[Grammars] = []
_THREADS = FairThreads(1, "llaisys-grammar")
_THREADS.submit("", lambda: None).result()  # its stack is in use before a job's memory is limited


def _load(tokenizer: str, eos_token_ids: list[int], vocab_size: int) -> None:
    grammars = Grammars(GrammarTokens(tokenizer, tuple(eos_token_ids), vocab_size))
    grammars.table()
    _GRAMMARS[:] = [grammars]


def _try(spec: Mapping[str, Any]) -> None:
    work = _THREADS.submit("", lambda: try_grammar(_GRAMMARS[0], StructuredOutputsParams(**spec)))
    work.result()


JOBS: Jobs = {"tokens": _load, "try": _try}
