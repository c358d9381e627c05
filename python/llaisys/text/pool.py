"""The tokenizer workers of a server: what a request's size or a template's author could make long is done
there."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from llaisys.body import Flaw
from llaisys.job_pool import JobPool, JobText
from llaisys.job_process import JobLimits
from llaisys.text.template import ChatTemplate
from llaisys.text.tokenizer import Tokenizer

N_PROCESSES = 2
# Tokenizing takes 0.6 to 0.8 s and 130 to 220 MB for a megabyte of text.
LIMITS = JobLimits(cpu_s=2.0, memory_bytes=512 << 20, cpu_s_per_byte=4e-6, memory_bytes_per_byte=512)
_TEXTS = {
    "chat": JobText("rendering and tokenising these messages", "messages"),
    "encode": JobText("tokenising this text", "prompt"),
    "decode": JobText("detokenizing these ids", "tokens"),
    "json": JobText("reading this body"),
    "kit": JobText("reading the tokenizer"),
}


class TextPool:
    """The processes for all models of a server. The methods belong to one event loop."""

    def __init__(self, limits: JobLimits = LIMITS) -> None:
        """`limits`: of each job."""
        self._jobs = JobPool("llaisys.text.child", N_PROCESSES, limits, _TEXTS, name="text")
        self._num_kits = 0

    def add(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> PromptMaker:
        """Makes a model known; the processes (started by the first one) read its tokenizer right away."""
        source = None if template is None else template.source
        texts = None if source is None else dict(source.texts)
        special = {} if source is None else dict(source.special_tokens)
        kit, self._num_kits = self._num_kits, self._num_kits + 1
        self._jobs.prepare("kit", kit, tokenizer.to_json(), texts, special)
        return PromptMaker(self._jobs, kit)

    async def ready(self) -> None:
        """Returns when every process knows every model. Raises RequestFailedError if one cannot."""
        await self._jobs.ready()

    async def read_body(self, raw: bytes, model: str | None) -> tuple[Any, Flaw | None]:
        """`llaisys.body.read_body` there; raises json.JSONDecodeError (its position alone), ValueError,
        RejectedError."""
        match await self._jobs.run("json", raw, model):
            case ["value", value, None]:
                return value, None
            case ["value", value, [list(place), str(kind), str(message)]]:
                return value, (tuple(place), kind, message)
            case ["position", int(position)]:
                raise json.JSONDecodeError("", "", position)
        raise ValueError("no JSON text")

    async def close(self) -> None:
        """Ends the processes; what they work on fails. Idempotent."""
        await self._jobs.close()


class PromptMaker:
    """Token ids of one model's prompts, made in the tokenizer workers."""

    def __init__(self, jobs: JobPool, kit: int) -> None:
        self._jobs = jobs
        self._kit = kit

    async def encode(self, text: str, add_special_tokens: bool, n_most: int | None = None) -> list[int]:
        """As `Tokenizer.encode`."""
        return _unpacked(await self._jobs.run("encode", self._kit, text, add_special_tokens, n_most))

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """As `Tokenizer.decode`."""
        packed = array("I", ids).tobytes()
        text: str = await self._jobs.run("decode", self._kit, packed, skip_special_tokens)
        return text

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        add_special_tokens: bool,
        n_most: int | None = None,
    ) -> list[int]:
        """A conversation as `ChatTemplate.render` renders it with these options, as `encode` encodes it."""
        arguments = (list(messages), dict(options), add_special_tokens, n_most)
        return _unpacked(await self._jobs.run("chat", self._kit, *arguments))


def _unpacked(raw: bytes) -> list[int]:
    return array("I", raw).tolist()
