"""AuthMiddleware: requires an API key on every path except the probes, the web UI and its assets.

A key is sent as `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic).

The rule lists exact open paths, not protected prefixes. So an unknown path gets 401, and a new route is
protected unless it is added to the open paths.

A keys file has one line `NAME SHA256` for each key. The name identifies the client for fairness, limits and
sessions; two keys of one name are one client. The hash is the SHA-256 of the key's UTF-8 bytes in
hexadecimal. Blank lines and lines that begin with `#` are skipped. The file is read only at startup.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.files import open_regular
from llaisys.server.http_errors import invalid_key, send_error

FILE_BYTES_MAX = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_EMPTY = hashlib.sha256(b"").digest()


class Keyring:
    """The accepted keys, as digests. Immutable. Empty: no key is required."""

    def __init__(self, named: Iterable[tuple[bytes, str]] = ()) -> None:
        """`named`: pairs of a key's SHA-256 and its client's name."""
        self._named = tuple(named)

    @staticmethod
    def of(config: Config) -> Keyring:
        """Return the keys of `api_key`, each named by the beginning of its hash, and those of `api_key_file`.

        Raises RejectedError naming the file's line, without its content.
        """
        digests = [hashlib.sha256(key.encode()).digest() for key in config.api_key]
        named = [(digest, digest.hex()[:16]) for digest in digests]
        if config.api_key_file is not None:
            named += _read(config.api_key_file)
        return Keyring(named)

    def __bool__(self) -> bool:
        return bool(self._named)

    @property
    def n_clients(self) -> int:
        """Return the number of clients with keys."""
        return len({name for _, name in self._named})

    def client_of(self, key: bytes) -> str | None:
        """Return the name of the key's client, or None for an unknown key.

        All digests are compared each time, so that timing reveals nothing.
        """
        digest = hashlib.sha256(key).digest()
        found = None
        for known, name in self._named:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def _read(path: Path) -> list[tuple[bytes, str]]:
    try:
        with open_regular(path) as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise RejectedError(f"cannot read the keys file {path}: {reason}", param="api_key_file") from None
    if len(raw) > FILE_BYTES_MAX:
        raise RejectedError(
            f"the keys file {path} is larger than {FILE_BYTES_MAX} bytes", param="api_key_file"
        )
    named: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) != 2 or not _NAME.fullmatch(parts[0]) or not _HASH.fullmatch(parts[1]):
            raise RejectedError(
                f"the keys file {path}, line {number}: expected NAME and the 64 hexadecimal digits of the "
                "key's SHA-256 (the key itself does not belong here)",
                param="api_key_file",
            )
        digest = bytes.fromhex(parts[1])
        if digest == _EMPTY:
            raise RejectedError(
                f"the keys file {path}, line {number}: this is the hash of an empty key, which anybody could "
                "send; check that the shell variable with the key is set",
                param="api_key_file",
            )
        if named.setdefault(digest, parts[0]) != parts[0]:
            raise RejectedError(
                f"the keys file {path}, line {number}: an earlier line has the same key with another name",
                param="api_key_file",
            )
    if not named:
        raise RejectedError(f"the keys file {path} has no keys", param="api_key_file")
    return list(named.items())


class AuthMiddleware:
    """Passes on requests with an accepted key, or all requests if there are no keys. Pure ASGI.

    Sets the client's name as `state["client_id"]` of the scope (`access_log.client_id_of`).
    """

    def __init__(self, app: ASGIApp, keys: Keyring, open_paths: Iterable[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] == "http" and self._keys and not self._is_open(scope):
            client = self._client(scope)
            if client is None:
                await send_error(send, scope, invalid_key())
                return
            scope.setdefault("state", {})["client_id"] = client
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._open_paths

    def _client(self, scope: Scope) -> str | None:
        """Return the client, or None without exactly one key.

        Headers are read as Latin-1, so non-ASCII keys are compared as the bytes sent.
        """
        headers = Headers(scope=scope)
        bearers, keys = headers.getlist("authorization"), headers.getlist("x-api-key")
        if len(bearers) > 1 or len(keys) > 1:
            return None
        for bearer in bearers:
            scheme, _, key = bearer.partition(" ")
            if scheme.lower() != "bearer":
                return None
            keys.append(key)
        return self._keys.client_of(keys[0].encode("latin-1")) if len(set(keys)) == 1 else None
