"""SessionClient: the API of named sessions (`AsyncLLM.sessions`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from llaisys.engine.sessions.manager import SessionRequest, check_name
from llaisys.session_info import SessionInfo

__all__ = ["SessionClient", "check_name"]


class SessionClient:
    """Manages sessions by `client_id` and name (1 to 64 of `A-Z a-z 0-9 _ . -`). Clients see only their own.

    A session keeps the tokens and the KV of the last request that named it. It is in the memory of the loaded
    engine: unloading, closing or restarting the engine drops it, so save a session that must survive.

    Every method raises RejectedError for an unknown or invalid name and for a session that is being restored.
    Every method raises UnsupportedError (no prefix cache), ExhaustedError (too many sessions or calls) or
    EngineDeadError.
    """

    def __init__(self, call: Callable[[SessionRequest], Awaitable[list[SessionInfo]]]) -> None:
        self._call = call

    async def list(self, *, client_id: str = "") -> list[SessionInfo]:
        """Return all sessions of the client, ordered by name."""
        return await self._call(SessionRequest(kind="list", client_id=client_id))

    async def create(self, name: str, *, client_id: str = "") -> SessionInfo:
        """Create an empty session. A request that names a new session creates it too."""
        return await self._call_one(SessionRequest(kind="create", client_id=client_id, name=name))

    async def fork(
        self, name: str, new_name: str, n_tokens: int | None = None, *, client_id: str = ""
    ) -> SessionInfo:
        """Create a session from the first `n_tokens` tokens of another (None: all). No KV is copied."""
        return await self._call_one(
            SessionRequest(kind="fork", client_id=client_id, name=name, other=new_name, n_tokens=n_tokens)
        )

    async def trim(self, name: str, n_tokens: int, *, client_id: str = "") -> SessionInfo:
        """Truncate the session to its first `n_tokens` tokens."""
        return await self._call_one(
            SessionRequest(kind="trim", client_id=client_id, name=name, n_tokens=n_tokens)
        )

    async def delete(self, name: str, *, client_id: str = "") -> SessionInfo:
        """Delete the session and return its last state. Saved files stay."""
        return await self._call_one(SessionRequest(kind="delete", client_id=client_id, name=name))

    async def save(self, name: str, file: str, *, client_id: str = "") -> SessionInfo:
        """Write the session to `file` in the client's folder of `session_store`; names are as for sessions.

        Returns when it is on disk; an existing file is replaced. Evicted parts are saved as tokens only.
        Raises StorageError if the disk fails, StorageFullError if it is full.
        """
        return await self._call_one(SessionRequest(kind="save", client_id=client_id, name=name, other=file))

    async def restore(
        self, file: str, name: str, *, client_id: str = "", cache_salt: str = ""
    ) -> SessionInfo:
        """Create the session `name` from a saved file. Requests that name it wait until it is restored.

        The next request recomputes KV that does not fit in the cache. Raises RejectedError (no such file,
        damaged, of another model) or UnsupportedError (its version); no session is created then.
        """
        return await self._call_one(
            SessionRequest(kind="restore", client_id=client_id, name=name, other=file, cache_salt=cache_salt)
        )

    async def _call_one(self, call: SessionRequest) -> SessionInfo:
        """Execute a request whose reply is one session."""
        (session,) = await self._call(call)
        return session
