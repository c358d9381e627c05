"""One streamed request to an OpenAI-compatible server, timed. The stamp comes before any parsing."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from llaisys.bench.record import RequestRecord
from llaisys.bench.workload import Prompt
from llaisys.errors import RejectedError, RequestFailedError

if TYPE_CHECKING:
    import aiohttp

Backend: TypeAlias = Literal["openai", "openai-chat"]
Message: TypeAlias = "dict[str, str]"

ENDPOINTS: Mapping[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
TIMEOUT_S = 6 * 3600
DETAIL_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go. `base_url`: with or without `/v1`; `endpoint`: the path, empty for the usual one.
    `fields`: what every body holds besides prompt, length and streaming (`temperature`, `ignore_eos` ...)."""

    base_url: str
    backend: Backend = "openai"
    endpoint: str = ""
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The address without `/v1`."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def url(self) -> str:
        """The address of requests."""
        return self.root + (self.endpoint or ENDPOINTS[self.backend])


def session_of(target: Target) -> aiohttp.ClientSession:
    """Connections without a bound of their own, kept alive. Raises RejectedError without aiohttp."""
    try:
        import aiohttp
    except ImportError as e:
        raise RejectedError("this needs aiohttp: pip install 'llaisys[bench]'", param="bench") from e
    return aiohttp.ClientSession(
        headers=target.headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        read_bufsize=2**20,
    )


async def first_model(session: aiohttp.ClientSession, target: Target) -> str:
    """The first name of /v1/models. Raises RejectedError if the server cannot be reached or names none."""
    url = f"{target.root}/v1/models"
    try:
        async with session.get(url) as answer:
            answer.raise_for_status()
            return str((await answer.json())["data"][0]["id"])
    except (OSError, _client_error(), LookupError, TypeError, ValueError) as e:
        raise RejectedError(
            f"cannot learn a model from {url} ({e}); name one with --model", param="model"
        ) from e


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: Prompt | Sequence[Message],
    output_len: int,
    record: RequestRecord,
) -> None:
    """Sends one request and fills in its record; what goes wrong is in `record.error`, not raised."""
    body = {
        "model": target.model,
        **_asked(target.backend, prompt, output_len),
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.fields,
    }
    raw = json.dumps(body).encode()
    stream = _Stream(record)
    record.start_s = record.end_s = time.perf_counter()
    try:
        async with session.post(target.url, data=raw, headers={"content-type": "application/json"}) as answer:
            record.status = answer.status
            if answer.status != 200:
                record.error = _refusal(answer.status, await answer.read())
                record.end_s = time.perf_counter()
                return
            async for data in answer.content.iter_any():
                stream.feed(data, time.perf_counter())
        stream.close()
    except RequestFailedError as e:
        record.error = str(e)
    except (OSError, _client_error(), LookupError, TypeError, ValueError) as e:
        record.error = f"{type(e).__name__}: {e}"[:DETAIL_MAX]


def _asked(backend: Backend, prompt: Prompt | Sequence[Message], output_len: int) -> dict[str, Any]:
    if backend == "openai":
        return {"prompt": prompt, "max_tokens": output_len}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {"messages": messages, "max_completion_tokens": output_len}


class _Stream:
    """Server-sent events of one answer, put together from whatever pieces the network makes of them."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._rest = b""
        self._texts: list[str] = []
        self._has_usage = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Bytes that arrived at `now_s`. Raises RequestFailedError for an error frame."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            value = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and value != b"[DONE]":
                self._chunk(json.loads(value), now_s)

    def close(self) -> None:
        """The end. Raises RequestFailedError for an answer that cannot be counted."""
        self._record.text = "".join(self._texts)
        if not self._has_usage:
            raise RequestFailedError("the answer ended without usage: its tokens cannot be counted")

    def _chunk(self, chunk: dict[str, Any], now_s: float) -> None:
        if "error" in chunk:
            raise RequestFailedError(f"in the stream: {_error_text(chunk)}")
        for choice in chunk.get("choices") or ():
            self._record.end_s = now_s
            if text := _text_of(choice):
                self._texts.append(text)
                if now_s not in self._record.chunk_times_s[-1:]:  # several frames in one read are one arrival
                    self._record.chunk_times_s.append(now_s)
        if usage := chunk.get("usage"):
            self._has_usage = True
            self._record.prompt_tokens = int(usage["prompt_tokens"])
            self._record.output_tokens = int(usage["completion_tokens"])
            details = usage.get("prompt_tokens_details") or {}
            self._record.cached_tokens = int(details.get("cached_tokens") or 0)


def _text_of(choice: Mapping[str, Any]) -> str:
    """What a choice of a chunk brings: text, reasoning, or a tool call's words."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    calls = "".join(str(call.get("function")) for call in delta.get("tool_calls") or ())
    return (
        (delta.get("reasoning_content") or delta.get("reasoning") or "")
        + (delta.get("content") or "")
        + calls
    )


def _refusal(status: int, raw: bytes) -> str:
    try:
        return f"{status}: {_error_text(json.loads(raw))}"
    except (ValueError, LookupError, TypeError):
        return f"{status}: {raw[:DETAIL_MAX].decode('utf-8', 'replace')}"


def _error_text(body: Mapping[str, Any]) -> str:
    error = body["error"]
    return str(error["message"] if isinstance(error, Mapping) else error)[:DETAIL_MAX]


def _client_error() -> type[Exception]:
    import aiohttp

    return aiohttp.ClientError
