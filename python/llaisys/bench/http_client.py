"""Sends one streamed request to an OpenAI-compatible server and times it, with timestamps taken before
parsing."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from llaisys.bench.request_record import RequestRecord
from llaisys.bench.workload import Prompt
from llaisys.errors import RejectedError, RequestFailedError

if TYPE_CHECKING:
    import aiohttp

Backend: TypeAlias = Literal["openai", "openai-chat"]
Message: TypeAlias = "dict[str, str]"

ENDPOINTS: Mapping[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
TIMEOUT_S = 6 * 3600
# Below the idle timeout of servers (uvicorn: 5 s), so that a request never uses a connection being closed.
KEEP_IDLE_S = 2.0
DETAIL_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server and the request options.

    - `base_url`: with or without `/v1`. `endpoint`: the path, empty for the backend's default.
    - `fields`: fields of every body in addition to prompt, length and streaming (such as `temperature`).
    """

    base_url: str
    backend: Backend = "openai"
    endpoint: str = ""
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """Return the URL without `/v1`."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def url(self) -> str:
        """Return the URL of requests."""
        return self.root + (self.endpoint or ENDPOINTS[self.backend])


def session_of(target: Target) -> aiohttp.ClientSession:
    """Return an HTTP session with any number of keep-alive connections. Raises RejectedError without
    aiohttp."""
    try:
        import aiohttp
    except ImportError as e:
        raise RejectedError("this needs aiohttp: pip install 'llaisys[bench]'", param="bench") from e
    return aiohttp.ClientSession(
        headers=target.headers,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        read_bufsize=2**20,
    )


async def first_model(session: aiohttp.ClientSession, target: Target) -> str:
    """Return the first name of /v1/models. Raises RejectedError if there is no server or no model."""
    url = f"{target.root}/v1/models"
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (OSError, _client_error(), LookupError, TypeError, ValueError) as e:
        raise RejectedError(
            f"cannot get a model name from {url} ({e}); set one with --model", param="model"
        ) from e


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: Prompt | Sequence[Message],
    output_len: int,
    record: RequestRecord,
) -> None:
    """Send one request and fill in its record; errors are stored in `record.error` and not raised."""
    body = {
        "model": target.model,
        **_prompt_fields(target.backend, prompt, output_len),
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.fields,
    }
    raw = json.dumps(body).encode()
    stream = _Stream(record)
    record.start_s = record.end_s = time.perf_counter()
    try:
        async with session.post(
            target.url, data=raw, headers={"content-type": "application/json"}
        ) as response:
            record.status = response.status
            if response.status != 200:
                record.error = _error_of_status(response.status, await response.read())
                record.end_s = time.perf_counter()
                return
            async for data in response.content.iter_any():
                stream.feed(data, time.perf_counter())
        stream.close()
    except RequestFailedError as e:
        record.error = str(e)
    except (OSError, _client_error(), LookupError, TypeError, ValueError) as e:
        record.error = f"{type(e).__name__}: {e}"[:DETAIL_MAX]


def _prompt_fields(backend: Backend, prompt: Prompt | Sequence[Message], output_len: int) -> dict[str, Any]:
    if backend == "openai":
        return {"prompt": prompt, "max_tokens": output_len}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {"messages": messages, "max_completion_tokens": output_len}


class _Stream:
    """Parses the server-sent events of one response from network reads of any size."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._rest = b""
        self._texts: list[str] = []
        self._has_usage = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse bytes that arrived at `now_s`. Raises RequestFailedError for an error event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            value = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and value != b"[DONE]":
                self._chunk(json.loads(value), now_s)

    def close(self) -> None:
        """Finish the record. Raises RequestFailedError for a response without usage."""
        self._record.text = "".join(self._texts)
        if not self._has_usage:
            raise RequestFailedError("the response ended without usage: its tokens cannot be counted")

    def _chunk(self, chunk: dict[str, Any], now_s: float) -> None:
        if "error" in chunk:
            raise RequestFailedError(f"in the stream: {_error_text(chunk)}")
        for choice in chunk.get("choices") or ():
            self._record.end_s = now_s
            if text := _text_of(choice):
                self._texts.append(text)
                if now_s not in self._record.chunk_times_s[-1:]:  # several events in one read arrive together
                    self._record.chunk_times_s.append(now_s)
        if usage := chunk.get("usage"):
            self._has_usage = True
            self._record.prompt_tokens = int(usage["prompt_tokens"])
            self._record.output_tokens = int(usage["completion_tokens"])
            details = usage.get("prompt_tokens_details") or {}
            self._record.cached_tokens = int(details.get("cached_tokens") or 0)


def _text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a chunk's choice: content, reasoning or tool calls."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    calls = "".join(str(call.get("function")) for call in delta.get("tool_calls") or ())
    return (
        (delta.get("reasoning_content") or delta.get("reasoning") or "")
        + (delta.get("content") or "")
        + calls
    )


def _error_of_status(status: int, raw: bytes) -> str:
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
