"""HostMiddleware: checks the Host and Origin headers, as a protection against other web sites.

Host must be a name of this server, against DNS rebinding (a site whose name is re-pointed to this machine).
Origin must be this server or a listed origin, so that no other site can send requests.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.server.http_errors import ApiError, send_error

PROBES = frozenset({"/livez", "/health", "/ready"})
# An IPv6 address in brackets, or a name; then an optional port.
HOST_PORT = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(?::([0-9]{1,5}))?")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def is_loopback(host: str) -> bool:
    """Return True for names and addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(config: Config) -> None:
    """Raise RejectedError for settings that would expose the server by mistake."""
    has_keys = bool(config.api_key or config.api_key_file)
    if config.uds is None and not is_loopback(config.host) and not has_keys:
        raise RejectedError(
            f"host {config.host} can be reached from other machines, so an API key is needed: "
            "set LLAISYS_API_KEY, --api-key-file or --api-key, or keep --host 127.0.0.1",
            param="host",
        )
    if "*" in config.allowed_origins:
        raise RejectedError(
            "allowed_origins: '*' would allow every web site; list the origins", param="allowed_origins"
        )


@dataclass(frozen=True, slots=True)
class HostRule:
    """Accepts `Host` values of this server.

    `names` match with the server's port or without a port. `wide` (bound to every address) also accepts
    literal addresses, which no site can re-point, and this machine's name. `listed` names match with any
    port.
    """

    names: frozenset[str]
    port: int
    wide: bool
    listed: frozenset[str]

    @staticmethod
    def of(config: Config, port: int) -> HostRule:
        """Return the rule for a server bound to `config.host` at `port`."""
        host = config.host.lower()
        bound = f"[{host}]" if ":" in host and not host.startswith("[") else host
        wide = bound in ("0.0.0.0", "[::]", "")
        names = {*LOOPBACK, bound} | (
            {socket.gethostname().lower(), socket.getfqdn().lower()} if wide else set()
        )
        return HostRule(
            frozenset(names), port, wide, frozenset(name.lower() for name in config.allowed_hosts)
        )

    def allows(self, value: str) -> bool:
        """Return True for an accepted `value`: a Host header, or an Origin without its scheme."""
        value = value.lower()
        parts = HOST_PORT.fullmatch(value)
        if parts is None:
            return False
        name, port = parts.groups()
        if value in self.listed or name in self.listed:
            return True
        if port not in (None, str(self.port)):
            return False
        return name in self.names or (self.wide and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True


class HostMiddleware:
    """Rejects WebSockets and requests with a wrong Host or Origin. Pure ASGI."""

    def __init__(self, app: ASGIApp, hosts: HostRule, allowed_origins: Iterable[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and (rejection := self._rejection(scope)) is not None:
            await send_error(send, scope, rejection)
        else:
            await self._app(scope, receive, send)

    def _rejection(self, scope: Scope) -> ApiError | None:
        """Return the error, if any. Probes skip the Host check, because probers use any address of the
        server."""
        headers = Headers(scope=scope)
        if "websocket" in headers.get("upgrade", "").lower():
            return ApiError(400, "WebSockets are not supported.", code="websocket_refused")
        if scope["path"] not in PROBES and not self._host_ok(headers):
            message = "The Host header is not one of this server's names; --allowed-hosts adds more."
            return ApiError(400, message, code="invalid_host")
        if not self._origin_ok(scope, headers):
            return ApiError(403, "Requests from this origin are not allowed.", code="origin_not_allowed")
        return None

    def _host_ok(self, headers: Headers) -> bool:
        values = headers.getlist("host")
        return len(values) == 1 and self._hosts.allows(values[0])

    def _origin_ok(self, scope: Scope, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        if not origins:
            navigation = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
            return navigation or headers.get("sec-fetch-site") != "cross-site"
        if len(origins) != 1:
            return False
        origin = origins[0].lower()
        scheme, _, rest = origin.partition("://")
        return origin in self._origins or (scheme in ("http", "https") and self._hosts.allows(rest))
