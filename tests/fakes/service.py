"""An AsyncLLM without an engine: completions are scripted, and the calls of the server are recorded."""

from __future__ import annotations

import asyncio
import json
import math
import struct
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fakes import core, text
from llaisys.config import Config
from llaisys.errors import EngineDeadError, LlaisysError, QueueFullError, UnsupportedError
from llaisys.lazy_engine import LazyEngine
from llaisys.lora_client import LoraClient
from llaisys.model_info import ModelInfo, Pooling
from llaisys.output_formats import OutputFormats
from llaisys.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from llaisys.sampling_params import SamplingParams, StructuredOutputsParams
from llaisys.stats import EngineStats, HistogramData, ServiceStats
from llaisys.text.chat_template import ChatTemplate
from llaisys.text.tokenizer import PairPrompt

FIRST_ID = 100
TOKENIZER = text.tokenizer()
STATS = ServiceStats(
    engine=EngineStats(
        num_running=2,
        num_waiting=5,
        num_steps=40,
        seq_ids_free=14,
        kv_cells=100,
        kv_cells_used=25,
        kv_cells_retained=60,
        kv_cells_free=30,
        recurrent_states_cached=7,
        recurrent_states_max=16,
        num_preempted=6,
        num_evicted_cells=80,
        prefix_query_tokens=500,
        prefix_hit_tokens=400,
        external_query_tokens=100,
        external_hit_tokens=70,
        tokens_of_steps=HistogramData((1.0, 8.0), (3, 4, 5), 90.0),
        seconds_of_phases={"plan": HistogramData((0.5,), (3, 1), 2.5)},
        seconds_of_cancels=HistogramData((0.5,), (0, 2), 3.25),
        waiting_by_reason={"capacity": 1, "preempted": 2, "sibling": 2, "remote_kv": 0},
    ),
    prompt_tokens=11,
    generation_tokens=7,
    invariant_violations=3,
    finished={"stop": 3, "length": 1},
    time_to_first_token_s=HistogramData((0.5, 1.0), (1, 2, 3), 9.5),
    time_per_output_token_s=HistogramData((0.5,), (1, 0), 0.25),
    queue_time_s=HistogramData((0.5,), (0, 2), 1.5),
    prefill_time_s=HistogramData((0.5,), (0, 3), 2.5),
    decode_time_s=HistogramData((0.5,), (0, 4), 3.5),
    inference_time_s=HistogramData((0.5,), (0, 5), 4.5),
    request_prompt_tokens=HistogramData((1.0,), (0, 1), 10.5),
    request_generation_tokens=HistogramData((1.0,), (0, 1), 11.5),
    max_num_generation_tokens=HistogramData((1.0,), (0, 1), 12.5),
    prefill_kv_computed_tokens=HistogramData((1.0,), (0, 1), 13.5),
    params_n=HistogramData((1.0,), (0, 1), 14.5),
    params_max_tokens=HistogramData((1.0,), (0, 1), 15.5),
)


@dataclass
class Piece:
    """A delta of one choice; its text is that of its tokens. `gate`: an event to wait for first."""

    tokens: Sequence[str] = ()
    finish: str | None = None
    stop_reason: int | str | None = None
    gate: asyncio.Event | None = None
    index: int = 0


@dataclass
class Call:
    """The arguments of a call of `generate`, and the state of its stream."""

    prompt: str | list[int]
    params: SamplingParams
    request_id: str
    options: dict[str, Any]
    ended: bool = False
    n_deltas: int = 0
    n_choices_ended: int = 0

    @property
    def client_id(self) -> str:
        return str(self.options["client_id"])


PieceOrError = Piece | Exception


@cache
def default_config() -> Config:
    """Return the configuration without settings, which takes 10 ms to create. It is immutable."""
    return Config()


def _no_loras() -> LoraClient:
    def no_engine() -> Any:
        raise AssertionError("there are no adapters")

    return LoraClient(LazyEngine(no_engine, "fake", None), default_config())


@dataclass
class FakeService:
    """Every `generate` yields `script`; token ids count up from 100."""

    script: Sequence[PieceOrError] = (Piece(["Hel", "lo"]), Piece(["!"], "stop"))
    model_names: tuple[str, ...] = ("tiny", "alias/of-tiny")
    max_model_len: int = 64
    system_fingerprint: str = "fp"
    default_sampling_params: Mapping[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    chats: list[tuple[list[dict[str, Any]], dict[str, Any]]] = field(default_factory=list)
    chat_error: Exception | None = None
    load_error: LlaisysError | None = None
    loaded: bool = True
    dead: bool = False
    stuck: bool = False
    lost: bool = False
    full: QueueFullError | None = None
    n_beats: int = 0
    config: Config = field(default_factory=default_config)
    template: ChatTemplate | None = None
    grammar_error: Exception | None = None
    embedding_error: LlaisysError | None = None
    metrics: RequestStateStats | None = None
    normalizes: bool = True
    unit_vectors: bool = False
    scores_pairs: bool = False
    pair_gate: asyncio.Event | None = None
    pairs: dict[bytes, dict[str, Any]] = field(default_factory=dict)
    n_open: int = 0
    n_open_most: int = 0
    loras: LoraClient = field(default_factory=_no_loras)

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(**json.loads(core.inspect("fake")))

    @property
    def template_text(self) -> str:
        return "" if self.template is None else self.template.text

    @property
    def pooling(self) -> Pooling:
        if isinstance(self.embedding_error, UnsupportedError):
            raise self.embedding_error
        return "last"

    def is_alive(self) -> bool:
        return not self.dead

    async def close(self, drain_s: float = 0.0) -> None:
        """Do nothing."""

    def refusal(self, client_id: str = "") -> QueueFullError | None:  # noqa: ARG002 -- AsyncLLM's signature
        return self.full

    def is_stuck(self) -> bool:
        return self.stuck

    def is_lost(self) -> bool:
        return self.lost

    def beat(self) -> None:
        self.n_beats += 1

    async def load(self) -> None:
        if self.load_error is not None:
            raise self.load_error
        self.loaded = True

    def is_loaded(self) -> bool:
        return self.loaded

    def is_ready(self) -> bool:
        return not self.dead

    def stats(self) -> ServiceStats:
        return STATS

    def max_prompt_tokens(self, params: SamplingParams) -> int | None:
        return None if params.truncate_prompt_tokens is not None else self.max_model_len

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        if self.chat_error is not None:
            raise self.chat_error
        self.chats.append(([dict(message) for message in messages], options))
        return [1, 2, 3]

    async def compile_grammar(self, spec: StructuredOutputsParams, client_id: str = "") -> None:  # noqa: ARG002 -- as AsyncLLM's
        if self.grammar_error is not None:
            raise self.grammar_error

    @property
    def output_formats(self) -> OutputFormats:
        return OutputFormats.of(self.config, self.template, TOKENIZER)

    async def prompt_ids(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        **options: Any,  # noqa: ARG002 -- AsyncLLM's
    ) -> list[int]:
        ids = list(prompt.encode() if isinstance(prompt, str) else prompt)
        n = params.truncate_prompt_tokens
        return ids if n is None else ids[:n] if params.truncation_side == "right" else ids[-n:]

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [7] * add_special_tokens + list(text.encode())

    async def token_strs(self, ids: Sequence[int]) -> list[str]:
        return [f"<{id}>" for id in ids]

    async def decode(self, ids: Sequence[int], **options: Any) -> str:  # noqa: ARG002 -- AsyncLLM's
        return bytes(ids).decode()

    async def pair_prompt(
        self,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> PairPrompt:
        ids = list(f"{query}|{document}".encode())[:truncate_prompt_tokens]
        self.pairs[bytes(ids)] = {"pair": (query, document), "instruction": instruction}
        return PairPrompt(ids)

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        if self.dead:
            raise EngineDeadError("shutting down")
        if options.get("pooling") == "score":
            options |= self.pairs[bytes(prompt)]  # type: ignore[arg-type]  # token ids
        call = Call(prompt if isinstance(prompt, str) else list(prompt), params, request_id, options)
        self.calls.append(call)
        token_id = FIRST_ID
        try:
            if options.get("pooling"):
                if self.pair_gate is not None:
                    await self.pair_gate.wait()
                yield await self._embed(call)
                return
            for piece in self.script:
                if isinstance(piece, Exception):
                    raise piece
                if piece.gate is not None:
                    await piece.gate.wait()
                yield self._delta(call, piece, token_id)
                token_id += len(piece.tokens)
        finally:
            call.ended = True

    async def until_calls(self, n_calls: int) -> None:
        """Return once `generate` was called this many times."""
        while len(self.calls) < n_calls:  # noqa: ASYNC110 -- other tasks of this loop make the calls
            await asyncio.sleep(0)

    async def _embed(self, call: Call) -> RequestOutput:
        """Return the ids of the prompt as its vector."""
        ids = await self.prompt_ids(call.prompt, call.params)
        self.n_open += 1
        self.n_open_most = max(self.n_open_most, self.n_open)
        await asyncio.sleep(0)
        self.n_open -= 1
        if self.embedding_error is not None:
            raise self.embedding_error
        answer = CompletionOutput(0, "", [], finish_reason="stop")
        if call.options["pooling"] == "score":
            score = pair_score(*call.options["pair"])
            return RequestOutput(call.request_id, None, ids, [answer], finished=True, score=score)
        length = math.hypot(*ids) if self.unit_vectors else 1.0
        vector = struct.pack(f"<{len(ids)}f", *(id / length for id in ids))
        return RequestOutput(call.request_id, None, ids, [answer], finished=True, embedding=vector)

    def _delta(self, call: Call, piece: Piece, first_id: int) -> RequestOutput:
        ids = list(range(first_id, first_id + len(piece.tokens)))
        logprobs = None
        if call.params.logprobs is not None:
            logprobs = [
                requested(i, text, call.params.logprob_token_ids)
                if call.params.logprob_token_ids
                else candidates(i, text, call.params.logprobs)
                for i, text in zip(ids, piece.tokens, strict=True)
            ]
        prompt_ids = call.prompt if isinstance(call.prompt, list) else list(call.prompt.encode())
        prompt_logprobs = None
        if call.params.prompt_logprobs is not None and call.n_deltas == 0:
            n_top = call.params.prompt_logprobs
            prompt_logprobs = [None, *(candidates(i, f"<{i}>", n_top) for i in prompt_ids[1:])]
        call.n_deltas += 1
        call.n_choices_ended += piece.finish is not None
        completion = CompletionOutput(
            index=piece.index,
            text="".join(piece.tokens),
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=piece.finish,
            stop_reason=piece.stop_reason,
        )
        n_cached = 1 if first_id == FIRST_ID else 0
        return RequestOutput(
            call.request_id,
            None,
            prompt_ids,
            [completion],
            finished=call.n_choices_ended == call.params.n,
            num_cached_tokens=n_cached,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
        )


def pair_score(query: str, document: str) -> float:
    """Return the score of a pair: a hash."""
    return zlib.crc32(f"{query}|{document}".encode()) / 2**32


def candidates(token_id: int, text: str, n_top: int) -> dict[int, Logprob]:
    """Return the sampled token, at rank 2, and the `n_top` best tokens, as the service does."""
    named = {token_id: Logprob(-1.0, 2, text)}
    best = [
        (9000, Logprob(-0.5, 1, "best")),
        (token_id, named[token_id]),
        (9001, Logprob(float("-inf"), 3, "never")),
    ]
    named |= dict(best[:n_top])
    return named


def requested(token_id: int, text: str, ids: Sequence[int]) -> dict[int, Logprob]:
    """Return the sampled token and the ids of `logprob_token_ids`, as the service does."""
    return {token_id: Logprob(-1.0, 2, text)} | {
        id: Logprob(-0.25 * id, None, f"<{id}>") for id in ids if id != token_id
    }
