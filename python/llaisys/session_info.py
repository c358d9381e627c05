"""SessionInfo: the state of a named session, and the format of session names."""

from __future__ import annotations

from dataclasses import dataclass

SESSION_NAME_MAX = 64
SESSION_NAME_PATTERN = rf"^[A-Za-z0-9_][A-Za-z0-9._-]{{0,{SESSION_NAME_MAX - 1}}}$"


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The current state of a session.

    - `num_tokens`: prompt and completion tokens of its last request, without the last token, whose K and V
      were not computed.
    - `num_cached_tokens`: the tokens that a request would find in the prefix cache.
    - `num_pinned_tokens`: the tokens whose cache nodes are pinned for the session.
    - `is_restoring`: the session is being read from a file, and requests that name it wait.
    """

    name: str
    num_tokens: int
    num_cached_tokens: int
    num_pinned_tokens: int
    is_restoring: bool = False
