"""The API key: asked for on every path but the probes, the page and its assets. Pure ASGI.

The rule is a list of exact open paths, not of closed prefixes: an unknown path is a 401, and a new route is
closed until somebody opens it here.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llaisys.server.errors import invalid_key, send_error


class KeyGate:
    """Lets a request through if it carries one of the keys; everything if there are none.

    Keys are kept and compared as SHA-256 of their UTF-8 bytes, all of them each time, so that neither the
    time nor a non-ASCII header tells anything.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Iterable[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and self._digests and not self._is_open(scope):
            key = self._known_key(scope)
            if key is None:
                await send_error(send, invalid_key())
                return
            scope.setdefault("state", {})["client_id"] = key
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._open_paths

    def _known_key(self, scope: Scope) -> str | None:
        """A name for the key that came, the same each time and of no use as a key; None if it is not ours."""
        values = Headers(scope=scope).getlist("authorization")
        scheme, _, key = (values[0] if len(values) == 1 else "").partition(" ")
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex()[:16] if scheme.lower() == "bearer" and any(matches) else None
