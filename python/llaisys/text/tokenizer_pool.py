"""TokenizerPool: the worker processes of a server that tokenize, render templates and parse bodies.

The time of this work grows with the request, so it runs in processes with limits on CPU time and memory.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from llaisys.body import InvalidField
from llaisys.job_pool import JobPool, JobText
from llaisys.job_process import JobLimits
from llaisys.text.chat_template import ChatTemplate
from llaisys.text.tokenizer import PairPrompt, Tokenizer

N_PROCESSES = 2
# Tokenizing takes 0.6 to 0.8 s and 130 to 220 MB for a megabyte of text.
LIMITS = JobLimits(cpu_s=2.0, memory_bytes=512 << 20, cpu_s_per_byte=4e-6, memory_bytes_per_byte=512)
_TEXTS = {
    "chat": JobText("rendering and tokenizing these messages", "messages"),
    "encode": JobText("tokenizing this text", "prompt"),
    "pair": JobText("tokenizing this pair of texts", "prompt"),
    "decode": JobText("detokenizing these ids", "tokens"),
    "json": JobText("reading this body"),
    "load": JobText("reading the tokenizer"),
}


class TokenizerPool:
    """Worker processes shared by all models of a server. Call its methods on one event loop."""

    def __init__(self, limits: JobLimits = LIMITS) -> None:
        """`limits`: the bounds of each job."""
        self._jobs = JobPool("llaisys.text.tokenizer_worker", N_PROCESSES, limits, _TEXTS, name="text")
        self._num_models = 0

    def add(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> AsyncTokenizer:
        """Register a model. The worker processes start with the first model and load its tokenizer at
        once."""
        source = None if template is None else template.source
        texts = None if source is None else dict(source.texts)
        special = {} if source is None else dict(source.special_tokens)
        model_index, self._num_models = self._num_models, self._num_models + 1
        self._jobs.prepare("load", model_index, tokenizer.to_json(), texts, special, tokenizer.is_encoder)
        return AsyncTokenizer(self._jobs, model_index)

    async def ready(self) -> None:
        """Wait until every worker has loaded every model. Raises RequestFailedError if one cannot."""
        await self._jobs.ready()

    async def read_body(self, raw: bytes, model: str | None) -> tuple[Any, InvalidField | None]:
        """Run `llaisys.body.read_body` in a worker.

        Raises json.JSONDecodeError (with the position only), ValueError or RejectedError.
        """
        match await self._jobs.run("json", raw, model):
            case ["value", value, None]:
                return value, None
            case ["value", value, [list(place), str(kind), str(message)]]:
                return value, (tuple(place), kind, message)
            case ["position", int(position)]:
                raise json.JSONDecodeError("", "", position)
        raise ValueError("the body is not a JSON text")

    async def close(self) -> None:
        """Stop the processes; open jobs fail. Idempotent."""
        await self._jobs.close()


class AsyncTokenizer:
    """Tokenizes and renders the prompts of one model in the tokenizer workers."""

    def __init__(self, jobs: JobPool, model_index: int) -> None:
        self._jobs = jobs
        self._model_index = model_index

    async def encode(self, text: str, add_special_tokens: bool, n_tokens_max: int | None = None) -> list[int]:
        """See `Tokenizer.encode`."""
        return _unpacked(
            await self._jobs.run("encode", self._model_index, text, add_special_tokens, n_tokens_max)
        )

    async def encode_pair(self, first: str, second: str, n_tokens_max: int | None) -> PairPrompt:
        """See `Tokenizer.encode_pair`."""
        packed, second_segment = await self._jobs.run("pair", self._model_index, first, second, n_tokens_max)
        return PairPrompt(_unpacked(packed), second_segment)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See `Tokenizer.decode`."""
        packed = array("I", ids).tobytes()
        text: str = await self._jobs.run("decode", self._model_index, packed, skip_special_tokens)
        return text

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        add_special_tokens: bool,
        n_tokens_max: int | None = None,
    ) -> list[int]:
        """Render a conversation as `ChatTemplate.render` does with these options, then encode it."""
        arguments = (list(messages), dict(options), add_special_tokens, n_tokens_max)
        return _unpacked(await self._jobs.run("chat", self._model_index, *arguments))


def _unpacked(raw: bytes) -> list[int]:
    return array("I", raw).tolist()
