"""Named sessions: whose tokens are kept under which name, and which of their cells stay pinned. Pure.

A session is a name of one client for the tokens that its last request computed, and a pin on their path of
the prefix index. Tokens stay until they are deleted; a pin goes when others need the cells or when all pins
together hold too many of them, that of the least recently used session first. What is lost that way is
computed again by the next request: never wrong, only slower.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from llaisys.engine.limits import Limits
from llaisys.engine.prefix import Lock
from llaisys.engine.request import BrokenInvariant, EngineRequest, Request
from llaisys.engine.retention import Retention
from llaisys.errors import ExhaustedError, LlaisysError, NotFoundError, RejectedError, UnsupportedError
from llaisys.shares import Shares
from llaisys.types import SESSION_NAME_MAX, SESSION_NAME_PATTERN, SessionInfo

_NAME = re.compile(SESSION_NAME_PATTERN[1:-1])

# Whose, and its name: nobody meets another client's.
SessionKey: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCall:
    """What a client asks of its sessions.

    - `name`: the session. `other`: the new one of `fork`, the file of `save` and `restore`.
    - `n_tokens`: how many stay, of `fork` and `trim`; None: all.
    - `cache_salt`: of `restore`: who shares the restored prefix. `call_id`: names the call on its way.
    """

    kind: Literal["list", "create", "fork", "trim", "delete", "save", "restore"]
    client_id: str = ""
    name: str = ""
    other: str = ""
    n_tokens: int | None = None
    cache_salt: str = ""
    call_id: int = 0


@dataclass(frozen=True, slots=True)
class SessionAnswer:
    """The one answer to a call: the session as it is now (of `list`: all), or why not."""

    call_id: int
    sessions: list[SessionInfo]
    error: LlaisysError | None = None


@dataclass(slots=True, eq=False)
class Session:
    """- `token_ids`: the tokens whose K and V were computed. `salt`, `stream`: the tree that they lie in.
    - `lock`: its pin; None: nothing of it is pinned. `is_restoring`: its requests wait.
    """

    key: SessionKey
    salt: str = ""
    stream: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    lock: Lock | None = None
    is_restoring: bool = False


class Sessions:
    """The sessions of one engine; the engine thread owns it.

    Invariants: `n_pinned` cells are pinned, and after each change these are at most `session_kv_share`.
    """

    def __init__(self, retention: Retention | None, limits: Limits) -> None:
        """Without `retention`, that is without a prefix cache, every call is refused."""
        self._maybe_retention = retention
        self._shares = Shares(limits.max_sessions, limits.n_clients)
        self._n_pinned_max = int(limits.n_cells * limits.session_kv_share)
        self._by_key: dict[SessionKey, Session] = {}
        # Those that have a pin, the least recently used first.
        self._pinned: OrderedDict[SessionKey, Session] = OrderedDict()

    def __len__(self) -> int:
        """Sessions of all clients."""
        return len(self._by_key)

    @property
    def n_pinned(self) -> int:
        """Cells that sessions keep from being evicted; one that several keep counts once."""
        return 0 if self._maybe_retention is None else self._maybe_retention.index.n_session_pinned

    # --- by name ---

    def find(self, client_id: str, name: str) -> Session:
        """A client's session. Raises NotFoundError for one that the client does not have."""
        check_name(name)
        session = self._by_key.get((client_id, name))
        if session is None:
            raise NotFoundError(f"there is no session {name!r}", param="session_id")
        return session

    def settled(self, client_id: str, name: str) -> Session:
        """As `find`; raises RejectedError while it is being restored, too."""
        session = self.find(client_id, name)
        if session.is_restoring:
            raise RejectedError(f"session {name!r} is being restored", param="session_id")
        return session

    def create(self, client_id: str, name: str) -> Session:
        """A new session without tokens. Raises RejectedError (the name) or ExhaustedError (too many)."""
        check_name(name)
        self._retention()
        key = (client_id, name)
        if key in self._by_key:
            raise RejectedError(f"there is a session {name!r} already", param="session_id")
        held = Counter(client for client, _ in self._by_key)
        if not self._shares.allows(held, client_id):
            has = f"there are {len(self._by_key)} sessions"
            if self._shares.n_clients > 1:
                has = f"this client has {held[client_id]} sessions ({self._shares.reserved} are its own)"
            raise ExhaustedError(f"{has}; max_sessions allows no more: delete one", param="session_id")
        session = self._by_key[key] = Session(key)
        return session

    def named_by(self, source: EngineRequest) -> Session | None:
        """The session that a request names, made if it is new. Raises as `create`."""
        if not source.session_id:
            return None
        key = (source.client_id, source.session_id)
        return self._by_key.get(key) or self.create(*key)

    # --- changes ---

    def settle(self, request: Request, n_computed: int, stream: int) -> None:
        """A request that named a session has ended: what it computed is the session's now.

        One that ended within its prompt leaves the session as it was, and of several choices the first
        counts. A session that was deleted meanwhile stays so.
        """
        source = request.source
        session = self._by_key.get((source.client_id, source.session_id))
        if session is None or session.is_restoring or request.index or n_computed < request.num_prompt:
            return
        self._assign(session, request.token_ids[:n_computed], source.cache_salt, stream)

    def fork(self, session: Session, name: str, n_tokens: int | None) -> Session:
        """A new session of the same client on the first tokens of this one; no cell is copied."""
        token_ids = session.token_ids[: self._count(session, n_tokens)]
        new = self.create(session.key[0], name)
        self._assign(new, token_ids, session.salt, session.stream)
        return new

    def trim(self, session: Session, n_tokens: int | None) -> None:
        """The session keeps its first tokens; the cells of the others can be evicted."""
        token_ids = session.token_ids[: self._count(session, n_tokens)]
        self._assign(session, token_ids, session.salt, session.stream)

    def delete(self, session: Session) -> None:
        """The session is gone; its cells can be evicted."""
        del self._by_key[session.key]
        self._unpin(session)

    def pin(self, session: Session) -> None:
        """Pins what is cached of a session, which counts as used now, and lets go of what is too much."""
        retention, old = self._retention(), session.lock
        session.lock = retention.keep(session.salt, session.token_ids, session.stream)
        self._pinned.pop(session.key, None)
        if session.lock is not None:
            self._pinned[session.key] = session
        if old is not None:
            retention.unpin(old)
        while self.n_pinned > self._n_pinned_max:
            self.unpin_oldest()

    def unpin_oldest(self) -> bool:
        """The least recently used session that has a pin loses it, of several clients with shares that of the
        client whose pins are the longest together. False if none has one."""
        if not self._pinned:
            return False
        pinned = list(self._pinned.values())
        most = pinned[0].key[0]
        if self._shares.n_clients > 1:
            lengths: Counter[str] = Counter()
            for session in pinned:
                lengths[session.key[0]] += 0 if session.lock is None else session.lock.n_tokens
            most = max(lengths, key=lengths.__getitem__)
        self._unpin(next(session for session in pinned if session.key[0] == most))
        return True

    # --- what is told ---

    def info(self, session: Session) -> SessionInfo:
        """A session as its client sees it."""
        retention, ids = self._retention(), session.token_ids
        return SessionInfo(
            name=session.key[1],
            num_tokens=len(ids),
            num_cached_tokens=retention.index.match(session.salt, ids, len(ids), session.stream).n_tokens,
            num_pinned_tokens=0 if session.lock is None else session.lock.n_tokens,
            is_restoring=session.is_restoring,
        )

    def infos(self, client_id: str) -> list[SessionInfo]:
        """All sessions of a client, by name."""
        mine = [session for key, session in self._by_key.items() if key[0] == client_id]
        return [self.info(session) for session in sorted(mine, key=lambda session: session.key)]

    def check(self) -> None:
        """Raises BrokenInvariant if too many cells are pinned, or the pins are not where they should be."""
        if self.n_pinned > self._n_pinned_max:
            raise BrokenInvariant(f"sessions pin {self.n_pinned} cells, allowed are {self._n_pinned_max}")
        pinned = {key for key, session in self._by_key.items() if session.lock is not None}
        if pinned != self._pinned.keys():
            raise BrokenInvariant(f"{len(pinned)} sessions have a pin, {len(self._pinned)} are listed")

    # --- inside ---

    def _retention(self) -> Retention:
        if self._maybe_retention is None:
            raise UnsupportedError("sessions need the prefix cache, which is off", param="session_id")
        return self._maybe_retention

    def _count(self, session: Session, n_tokens: int | None) -> int:
        n_most = len(session.token_ids)
        if n_tokens is not None and not 0 <= n_tokens <= n_most:
            raise RejectedError(
                f"n_tokens is {n_tokens}, session {session.key[1]!r} has {n_most}", param="n_tokens"
            )
        return n_most if n_tokens is None else n_tokens

    def _assign(self, session: Session, token_ids: array[int], salt: str, stream: int) -> None:
        session.token_ids, session.salt, session.stream = token_ids, salt, stream
        self.pin(session)

    def _unpin(self, session: Session) -> None:
        if session.lock is not None:
            self._retention().unpin(session.lock)
            session.lock = None
            del self._pinned[session.key]


def check_name(name: str, param: str = "session_id") -> None:
    """Raises RejectedError for a name that is no plain one of a session or a file."""
    if _NAME.fullmatch(name) is None:
        raise RejectedError(
            f"{param} is {name[: 2 * SESSION_NAME_MAX]!r}: allowed are 1 to {SESSION_NAME_MAX} of "
            "A-Z a-z 0-9 _ . -, the first no . or -",
            param=param,
        )
