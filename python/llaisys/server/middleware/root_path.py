"""RootPathMiddleware: serves the same paths below `--root-path`, for a proxy that does not remove it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Removes the root path from the path of a request. Pure ASGI.

    It is the outermost middleware, so that every check sees the same path with and without the root path.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        path, root = scope.get("path", ""), self._root_path
        if path == root or path.startswith(f"{root}/"):
            scope = {**scope, "path": path[len(root) :] or "/"}
        await self._app(scope, receive, send)
