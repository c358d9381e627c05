"""Affinity: which requests should run on the same replica, and in which order replicas are tried.

Both are pure and keep no state, so that all gateways agree, also after a restart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The beginning of a text that later requests repeat: bytes of a prompt, or tokens of a list of ids.
PREFIX_LENGTH = 256
SESSIONS_PATH = "/v1/sessions/"


@dataclass(frozen=True, slots=True)
class Affinity:
    """What a request shares with the requests that should run where it runs.

    - `key`: equal for all turns of a conversation; empty if the request has no prompt.
    - `is_session`: the replica has a state of the client, so load does not matter.
    """

    key: bytes = b""
    is_session: bool = False


def affinity_of(path: str, body: Any) -> Affinity:
    """Return the affinity of a request by its path and its JSON body, of any shape."""
    body = body if isinstance(body, dict) else {}
    name = path.removeprefix(SESSIONS_PATH).split("/")[0] if path.startswith(SESSIONS_PATH) else ""
    name = name or body.get("session_id") or ""
    if isinstance(name, str) and name:
        return Affinity(_digest("session", name), is_session=True)
    prompt = next((body[key] for key in ("messages", "prompt", "input") if body.get(key)), None)
    return Affinity() if prompt is None else Affinity(_digest(body.get("model"), _beginning(prompt)))


def _beginning(prompt: Any) -> Any:
    """Return what later turns repeat: the messages up to the first of the user, or the head of a text."""
    if not isinstance(prompt, list):
        return str(prompt)[:PREFIX_LENGTH]
    roles = [each.get("role") if isinstance(each, dict) else None for each in prompt]
    n_first = roles.index("user") + 1 if "user" in roles else PREFIX_LENGTH
    return prompt[:n_first]


def _digest(*values: Any) -> bytes:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).digest()


def rank_replicas(affinity: Affinity, n_open: Mapping[str, int], target: int) -> Sequence[str]:
    """Return the replicas in the order in which a request should try them.

    `n_open`: for each replica, its open requests. Of those with fewer than `target`, the order is that of
    rendezvous hashing: if a replica comes or goes, the others keep their keys. Fuller ones follow, the least
    full first. A session's order is that of the hash alone.
    """

    def weight(replica: str) -> bytes:
        return hashlib.blake2b(replica.encode(), key=affinity.key, digest_size=8).digest()

    ranked = sorted(n_open, key=weight)
    if affinity.is_session:
        return ranked
    return sorted(ranked, key=lambda replica: max(0, n_open[replica] - target + 1))
