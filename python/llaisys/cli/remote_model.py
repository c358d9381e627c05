"""A model behind a running server, for `llaisys chat --url`."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from llaisys.cli.reasoning_tags import ReasoningTags
from llaisys.errors import RejectedError, RequestFailedError

TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """`url`: the server, with or without `/v1`. `key`: empty for none. `model`: a served name."""

    url: str
    key: str
    model: str

    def chat(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], show: Callable[[str], None]
    ) -> None:
        """Stream the next message of a conversation to `show`.

        Raises RejectedError (the address), RequestFailedError (with the server's message), or
        KeyboardInterrupt after Ctrl-C has closed the connection, which cancels the request.
        """
        body = json.dumps({"model": self.model, "messages": list(messages), "stream": True, **fields})
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        connection, path = self._connection()
        with contextlib.closing(connection):
            for text in self._stream_completion(connection, path, body.encode(), headers):
                show(text)

    def _stream_completion(
        self, connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Iterator[str]:
        """Yield the pieces of the completion. Errors of the consumer are not treated as connection errors."""
        try:
            connection.request("POST", path, body, headers)
            yield from _texts(connection.getresponse())
        except (OSError, http.client.HTTPException) as e:
            raise RejectedError(f"cannot reach {self.url}: {e}", param="url") from e

    def _connection(self) -> tuple[http.client.HTTPConnection, str]:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RejectedError(f"{self.url!r} is not a URL like http://127.0.0.1:8000", param="url")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        root = parts.path.rstrip("/").removesuffix("/v1")
        return kind(parts.hostname, parts.port, timeout=TIMEOUT_S), f"{root}/v1/chat/completions"


def _texts(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the pieces of a stream, with reasoning in tags as in the text of a local model.

    Raises RequestFailedError for an error before or in the stream.
    """
    tags = ReasoningTags()
    if response.status != 200:
        raise RequestFailedError(f"the server responded {response.status}: {_error_text(response.read())}")
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise RequestFailedError(str(chunk["error"]["message"]))
        for choice in chunk["choices"]:
            reasoning, content = (choice["delta"].get(name) or "" for name in ("reasoning", "content"))
            if text := tags.text(reasoning, content):
                yield text


def _error_text(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")
