"""Requests and limits for the engine's tests, with defaults."""

from __future__ import annotations

from typing import Any

from fakes.core import CELL_BYTES, VOCAB_SIZE
from llaisys.engine.limits import Limits
from llaisys.engine.request import EngineRequest
from llaisys.sampling_params import SamplingParams


def limits(**changes: Any) -> Limits:
    """Return limits with capacity for four requests of 64 tokens."""
    facts = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_num_queued_reqs": 8,
        "max_model_len": 64,
        "n_cells": 256,
        "vocab_size": VOCAB_SIZE,
        "kv_cell_bytes": CELL_BYTES,
        "timeout_scan_s": 0.0,
    }
    return Limits(**{**facts, **changes})


def ask(request_id: str = "r", prompt: list[int] | None = None, **changes: Any) -> EngineRequest:
    """Return a greedy request of up to ten output tokens.

    `changes`: fields of EngineRequest or of its SamplingParams.
    """
    facts: dict[str, Any] = {"eos_token_ids": (256, 257), "arrival_s": 1000.0, "deadline_s": 1600.0}
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10}
    for name, value in changes.items():
        (facts if name in EngineRequest.__slots__ else params)[name] = value
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3] if prompt is None else prompt,
        params=SamplingParams(**params),
        **facts,
    )
