"""The jobs of the grammar worker process, which tries grammars for `llaisys.grammar_trials`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llaisys.engine.grammar import FairThreadPool, GrammarCompiler, GrammarTokenizer, try_grammar
from llaisys.job_process import Jobs
from llaisys.sampling_params import StructuredOutputsParams

_COMPILER: list[GrammarCompiler] = []
_THREADS = FairThreadPool(1, "llaisys-grammar")
_THREADS.submit("", lambda: None).result()  # allocates the stack before a job's memory is limited


def _load_tokenizer(tokenizer: str, eos_token_ids: list[int], vocab_size: int) -> None:
    compiler = GrammarCompiler(GrammarTokenizer(tokenizer, tuple(eos_token_ids), vocab_size))
    compiler.table()
    _COMPILER[:] = [compiler]


def _try_grammar(spec: Mapping[str, Any]) -> None:
    work = _THREADS.submit("", lambda: try_grammar(_COMPILER[0], StructuredOutputsParams(**spec)))
    work.result()


JOBS: Jobs = {"load_tokenizer": _load_tokenizer, "try_grammar": _try_grammar}
