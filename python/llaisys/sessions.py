"""`AsyncLLM.sessions`: what a client can do with its named sessions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from llaisys.engine.sessions import SessionCall, check_name
from llaisys.types import SessionInfo

__all__ = ["SessionDoor", "check_name"]


class SessionDoor:
    """Sessions by `client_id` and name (1 to 64 of `A-Z a-z 0-9 _ . -`); a client has no others than its own.

    A session keeps the tokens and the KV of the last request that named it. It lives in the loaded engine: an
    unloaded, closed or restarted one has none, so what shall outlive it is saved.

    Every method raises RejectedError (an unknown or wrong name, a session that is being restored),
    UnsupportedError (no prefix cache), ExhaustedError (too many sessions or calls) or EngineDeadError.
    """

    def __init__(self, call: Callable[[SessionCall], Awaitable[list[SessionInfo]]]) -> None:
        self._call = call

    async def list(self, *, client_id: str = "") -> list[SessionInfo]:
        """All sessions of the client, by name."""
        return await self._call(SessionCall(kind="list", client_id=client_id))

    async def create(self, name: str, *, client_id: str = "") -> SessionInfo:
        """An empty session; a request that names a new one makes it, too."""
        return await self._one(SessionCall(kind="create", client_id=client_id, name=name))

    async def fork(
        self, name: str, new_name: str, n_tokens: int | None = None, *, client_id: str = ""
    ) -> SessionInfo:
        """A new session on the first `n_tokens` tokens (None: all) of another; no KV is copied."""
        return await self._one(
            SessionCall(kind="fork", client_id=client_id, name=name, other=new_name, n_tokens=n_tokens)
        )

    async def trim(self, name: str, n_tokens: int, *, client_id: str = "") -> SessionInfo:
        """The session keeps its first `n_tokens` tokens."""
        return await self._one(SessionCall(kind="trim", client_id=client_id, name=name, n_tokens=n_tokens))

    async def delete(self, name: str, *, client_id: str = "") -> SessionInfo:
        """The session as it was. Files of it stay."""
        return await self._one(SessionCall(kind="delete", client_id=client_id, name=name))

    async def save(self, name: str, file: str, *, client_id: str = "") -> SessionInfo:
        """Writes the session to `file` (a plain name, as a session's) of the client's in `session_store`.

        Returns when it is on the disk; one of the same name is replaced. What was evicted of the session is
        saved as tokens only. Raises StorageError if the disk fails, StorageFullError if it is full.
        """
        return await self._one(SessionCall(kind="save", client_id=client_id, name=name, other=file))

    async def restore(
        self, file: str, name: str, *, client_id: str = "", cache_salt: str = ""
    ) -> SessionInfo:
        """Makes the new session `name` of a saved one. Requests that name it wait until it is there.

        What finds no room is computed again by the next request. Raises RejectedError (no such file, damaged,
        of another model) or UnsupportedError (its version); then there is no session.
        """
        return await self._one(
            SessionCall(kind="restore", client_id=client_id, name=name, other=file, cache_salt=cache_salt)
        )

    async def _one(self, call: SessionCall) -> SessionInfo:
        (session,) = await self._call(call)
        return session
