"""The API keys: read from the settings and the keys file, kept as SHA-256, each with the name of its client.

A keys file has a line for each key, `NAME SHA256`: the name is the client whom fairness, limits and sessions
are counted for (two keys of one name are one client), the hash that of the key's UTF-8 bytes in hexadecimal.
Blank lines and lines that begin with `#` are passed over. It is read at the start only.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.files import open_regular

FILE_BYTES_MAX = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_EMPTY = hashlib.sha256(b"").digest()


class Keyring:
    """Which keys are ours. Immutable; holds no key, only digests. Empty: no key is asked for."""

    def __init__(self, named: Iterable[tuple[bytes, str]] = ()) -> None:
        """`named`: SHA-256 of a key and its client's name."""
        self._named = tuple(named)

    @staticmethod
    def of(config: Config) -> Keyring:
        """The keys of `api_key`, each named by the beginning of its hash, and those of `api_key_file`.

        Raises RejectedError naming the file's line, never showing what stands there.
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
        """Clients that have keys."""
        return len({name for _, name in self._named})

    def client_of(self, key: bytes) -> str | None:
        """The name of the client whose key this is; None if it is nobody's.

        All digests are compared each time, so that the time tells nothing.
        """
        digest = hashlib.sha256(key).digest()
        found = None
        for known, name in self._named:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def cache_salt(client_id: str, salt: str, sharing: Literal["per-key", "all"]) -> str:
    """The salt of a request's cached prefixes: where there are keys, and unless all share theirs, other
    clients' requests have other ones, whatever `salt` they bring. A client's name holds no `/`."""
    return f"{client_id}/{salt}" if client_id and sharing == "per-key" else salt


def engine_id(client_id: str, id: str) -> str:
    """The engine's name of a client's request: no other client can have or meet it. A client's name holds no
    `/`, and no request's id does."""
    return f"{client_id}/{id}" if client_id else id


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
                "send; is the shell variable unset that should hold the key?",
                param="api_key_file",
            )
        if named.setdefault(digest, parts[0]) != parts[0]:
            raise RejectedError(
                f"the keys file {path}, line {number}: the same key has another name above",
                param="api_key_file",
            )
    if not named:
        raise RejectedError(f"the keys file {path} has no keys", param="api_key_file")
    return list(named.items())
