"""run_batch: runs a file of requests in OpenAI's batch format through the server's routes, in this process.

Each input line has one output line, in the same order. If a line fails, its error is its result; the other
lines are not affected.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from starlette.types import ASGIApp, Message

from llaisys.config import Config
from llaisys.errors import EngineDeadError
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_handlers
from llaisys.server.http_errors import to_json
from llaisys.server.routes.completions import PROMPTS_MAX
from llaisys.server.state import ServerState

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The number of lines, and of lines with an error."""

    n_lines: int
    n_failed: int


@dataclass(frozen=True, slots=True)
class _Line:
    """An output line, as JSON in pieces. `is_good`: the response is not an error."""

    parts: list[bytes]
    is_good: bool


class _BadLine(Exception):
    """An invalid input line: an error code for programs, and its `custom_id` if known."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


async def run_batch(config: Config, lines: Iterable[str], out: TextIO) -> BatchReport:
    """Load the models, truncate `out`, and run each line that is not blank.

    Only complete lines are written, in order. Raises the errors of loading, and EngineDeadError if an engine
    dies; all later lines have status 503.
    """
    config = _batch_config(config)
    models = await ModelRegistry.start(config)
    try:
        out.truncate(0)
        state = ServerState(config, models=models)
        report = await _run_lines(create_handlers(state), lines, out, config.max_num_seqs)
        if not models.is_alive():
            raise EngineDeadError("the engine died; all later lines have status 503")
        return report
    finally:
        await models.close()


def _batch_config(config: Config) -> Config:
    """Return a configuration whose limits reject no line. Requests have no timeout unless `request_timeout_s`
    is set."""
    queued = max(config.max_num_queued_reqs, config.max_num_seqs * PROMPTS_MAX)
    own: dict[str, Any] = {
        "max_num_queued_reqs": queued,
        "max_num_queued_tokens": None,
        "max_response_bytes_in_flight": config.max_response_bytes * config.max_num_seqs,
    }
    if "request_timeout_s" not in config.model_fields_set:
        own["request_timeout_s"] = math.inf
    return config.model_copy(update=own)


async def _run_lines(app: ASGIApp, lines: Iterable[str], out: TextIO, n_concurrent: int) -> BatchReport:
    """Run up to `n_concurrent` lines at a time, including finished ones that wait for earlier lines."""
    waiting: deque[asyncio.Task[_Line]] = deque()
    n_lines = n_failed = 0
    feed: Iterator[str] = (line for line in lines if line.strip())
    try:
        while True:
            while len(waiting) < n_concurrent and (line := next(feed, None)) is not None:
                waiting.append(asyncio.ensure_future(_run_line(app, line)))
            if not waiting:
                return BatchReport(n_lines, n_failed)
            result = await waiting[0]
            waiting.popleft()
            decoder = codecs.getincrementaldecoder("utf-8")()  # a piece may end inside a character
            for part in result.parts:
                out.write(decoder.decode(part))
            out.write("\n")
            out.flush()
            n_lines += 1
            n_failed += not result.is_good
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _run_line(app: ASGIApp, line: str) -> _Line:
    """Return the output line of one input line. The response body is written unchanged: JSON on one line."""
    result: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}"}
    try:
        custom_id, url, body = _parse(line)
    except _BadLine as e:
        error = {"code": e.code, "message": str(e)}
        whole = {**result, "custom_id": e.custom_id, "response": None, "error": error}
        return _Line([to_json(whole)], is_good=False)
    status, headers, raw = await _post(app, url, to_json(body))
    begin = to_json({**result, "custom_id": custom_id})[:-1] + b',"response":'
    response = to_json({"status_code": status, "request_id": headers["x-request-id"]})[:-1] + b',"body":'
    return _Line([begin, response, *raw, b'},"error":null}'], is_good=status == 200)


def _parse(line: str) -> tuple[str, str, dict[str, Any]]:
    """Return (custom_id, url, body) of a line. Raises _BadLine."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise _BadLine("invalid_json", f"the line is not valid JSON: {e}") from e
    custom_id = entry.get("custom_id") if isinstance(entry, dict) else None
    if not isinstance(custom_id, str):
        raise _BadLine("missing_custom_id", "the line must be an object with a string as its custom_id")
    method, url, body = entry.get("method", "POST"), entry.get("url"), entry.get("body")
    if method != "POST" or url not in URLS:
        found = f"{str(method)[:10]} {str(url)[:100]}"
        raise _BadLine("invalid_url", f"{found} is not supported; use POST {', '.join(URLS)}", custom_id)
    if not isinstance(body, dict):
        raise _BadLine("invalid_body", "body must be an object", custom_id)
    if body.get("stream"):
        raise _BadLine("invalid_body", "stream is not supported in a batch; leave it out", custom_id)
    return custom_id, url, body


async def _post(app: ASGIApp, path: str, body: bytes) -> tuple[int, dict[str, str], list[bytes]]:
    """POST a body to the application; return status, headers and the pieces of the response body."""
    sent: list[Message] = []
    bodies = [body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop()}
        await asyncio.Event().wait()
        raise AssertionError("this event is never set")

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    start, *parts = sent
    result = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    return start["status"], result, [part["body"] for part in parts]
