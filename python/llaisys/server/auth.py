"""The API key: asked for on every path but the probes, the page and its assets. Pure ASGI.

The rule is a list of exact open paths, not of closed prefixes: an unknown path is a 401, and a new route is
closed until somebody opens it here.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llaisys.server.errors import invalid_key, send_error
from llaisys.server.keys import Keyring


class KeyGate:
    """Lets a request through if it carries one of the keys; everything if there are none.

    Whose key it is stands in `state["client_id"]` of the scope (`trace.client_id_of`) from here on.
    """

    def __init__(self, app: ASGIApp, keys: Keyring, open_paths: Iterable[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and self._keys and not self._is_open(scope):
            client = self._client(scope)
            if client is None:
                await send_error(send, invalid_key())
                return
            scope.setdefault("state", {})["client_id"] = client
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._open_paths

    def _client(self, scope: Scope) -> str | None:
        """Headers come as bytes, read as Latin-1; so a key that is not ASCII is compared as it was sent."""
        values = Headers(scope=scope).getlist("authorization")
        scheme, _, key = (values[0] if len(values) == 1 else "").partition(" ")
        return self._keys.client_of(key.encode("latin-1")) if scheme.lower() == "bearer" else None
