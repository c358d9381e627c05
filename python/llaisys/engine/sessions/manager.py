"""SessionManager: the named sessions of all clients, and the pins on their cells. Pure.

A session is a client's name for the tokens that its last request computed, with a pin on their path in the
prefix cache. The tokens stay until the session is deleted. Pins are released, least recently used session
first, when requests need the cells or when the pins exceed their share. The next request then computes the
evicted tokens again, with the same result.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from llaisys.engine.kv_cache_manager import KvCacheManager
from llaisys.engine.limits import Limits
from llaisys.engine.prefix_cache import Pin
from llaisys.engine.request import BrokenInvariant, EngineRequest, Request
from llaisys.errors import ExhaustedError, LlaisysError, NotFoundError, RejectedError, UnsupportedError
from llaisys.session_info import SESSION_NAME_MAX, SESSION_NAME_PATTERN, SessionInfo
from llaisys.shares import Shares

_NAME = re.compile(SESSION_NAME_PATTERN[1:-1])

# Client id and session name, so that a client cannot access the sessions of another.
SessionKey: TypeAlias = tuple[str, str]


class SessionRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One operation on a client's sessions; also the message that carries it to the engine.

    - `name`: the session. `other`: the new session of `fork`, the file of `save` and `restore`.
    - `n_tokens`: number of tokens that `fork` and `trim` keep. None stands for all.
    - `cache_salt`: the salt of a restored prefix. Only requests with the same salt share it.
    - `call_id`: matches the reply with the request.
    """

    kind: Literal["list", "create", "fork", "trim", "delete", "save", "restore"]
    client_id: str = ""
    name: str = ""
    other: str = ""
    n_tokens: int | None = None
    cache_salt: str = ""
    call_id: int = 0


class SessionReply(msgspec.Struct, frozen=True, tag=True):
    """The single reply to a SessionRequest: the resulting session (all sessions for `list`), or the error."""

    call_id: int
    sessions: list[SessionInfo]
    error: LlaisysError | None = None


@dataclass(slots=True, eq=False)
class Session:
    """One named session.

    - `token_ids`: the tokens whose K and V were computed. `salt`, `stream`: identify their tree in the prefix
      cache.
    - `pin`: None if nothing is pinned. `is_restoring`: a restore is in progress, and the session's requests
      wait.
    """

    key: SessionKey
    salt: str = ""
    stream: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    pin: Pin | None = None
    is_restoring: bool = False


class SessionManager:
    """The sessions of one engine. Engine thread only.

    Invariant: after each change, at most the share `session_kv_share` of all cells is pinned (`n_pinned`),
    and at most this share of the recurrent states, of which a pin needs one.
    """

    def __init__(self, kv_cache: KvCacheManager, limits: Limits) -> None:
        """Initialize without sessions. If prefix caching is off, every operation is rejected."""
        self._kv_cache = kv_cache
        n_states = int(limits.n_states_kept * limits.session_kv_share)
        self._n_pins_max = n_states if limits.state_bytes else limits.max_sessions
        self._shares = Shares(limits.max_sessions, limits.n_clients)
        self._n_pinned_max = int(limits.n_cells * limits.session_kv_share)
        self._by_key: dict[SessionKey, Session] = {}
        # Sessions with a pin, the least recently used first.
        self._pinned: OrderedDict[SessionKey, Session] = OrderedDict()

    def __len__(self) -> int:
        """Number of sessions of all clients."""
        return len(self._by_key)

    @property
    def n_pinned(self) -> int:
        """Number of cells pinned by sessions; a cell pinned by several sessions counts once."""
        return self._kv_cache.prefix_cache.n_session_pinned

    # --- by name ---

    def find(self, client_id: str, name: str) -> Session:
        """Return a client's session. Raises NotFoundError if the client has no such session."""
        check_name(name)
        session = self._by_key.get((client_id, name))
        if session is None:
            raise NotFoundError(f"there is no session {name!r}", param="session_id")
        return session

    def find_ready(self, client_id: str, name: str) -> Session:
        """Return a session as `find` does; also raises RejectedError while it is being restored."""
        session = self.find(client_id, name)
        if session.is_restoring:
            raise RejectedError(f"session {name!r} is being restored", param="session_id")
        return session

    def create(self, client_id: str, name: str) -> Session:
        """Create an empty session.

        Raises RejectedError (invalid or taken name) or ExhaustedError (too many).
        """
        check_name(name)
        self._required_cache()
        key = (client_id, name)
        if key in self._by_key:
            raise RejectedError(f"session {name!r} already exists", param="session_id")
        n_by_client = Counter(client for client, _ in self._by_key)
        if not self._shares.allows(n_by_client, client_id):
            text = f"there are {len(self._by_key)} sessions"
            if self._shares.n_clients > 1:
                n_reserved = self._shares.reserved
                text = f"this client has {n_by_client[client_id]} sessions ({n_reserved} are reserved for it)"
            raise ExhaustedError(f"{text}, which is the limit (max_sessions); delete one", param="session_id")
        session = self._by_key[key] = Session(key)
        return session

    def get_or_create(self, source: EngineRequest) -> Session | None:
        """Return the session that a request names; create it if it is new. Raises the errors of `create`."""
        if not source.session_id:
            return None
        key = (source.client_id, source.session_id)
        return self._by_key.get(key) or self.create(*key)

    # --- changes ---

    def update_from_request(self, request: Request, n_computed: int, stream: int) -> None:
        """Store the tokens computed by an ended request in the session that it names.

        A request that ended within its prompt has no effect. Of several choices, only the first counts. A
        session that was deleted in between stays deleted.
        """
        source = request.source
        session = self._by_key.get((source.client_id, source.session_id))
        if session is None or session.is_restoring or request.index or n_computed < request.num_prompt:
            return
        self._assign(session, request.token_ids[:n_computed], source.cache_salt, stream)

    def fork(self, session: Session, name: str, n_tokens: int | None) -> Session:
        """Create a session of the same client from the first tokens of this one; no cell is copied."""
        token_ids = session.token_ids[: self._checked_count(session, n_tokens)]
        new = self.create(session.key[0], name)
        self._assign(new, token_ids, session.salt, session.stream)
        return new

    def trim(self, session: Session, n_tokens: int | None) -> None:
        """Keep the first tokens of a session; the cells of the others become evictable."""
        token_ids = session.token_ids[: self._checked_count(session, n_tokens)]
        self._assign(session, token_ids, session.salt, session.stream)

    def delete(self, session: Session) -> None:
        """Delete a session; its cells become evictable."""
        del self._by_key[session.key]
        self._unpin(session)

    def pin(self, session: Session) -> None:
        """Pin the cached part of a session and make it the most recently used one.

        While sessions pin more cells or states than allowed, release the least recently used pins.
        """
        kv_cache, old = self._required_cache(), session.pin
        session.pin = kv_cache.pin_session(
            session.salt, session.token_ids, session.stream, is_restoring=session.is_restoring
        )
        self._pinned.pop(session.key, None)
        if session.pin is not None:
            self._pinned[session.key] = session
        if old is not None:
            kv_cache.unpin(old)
        while self.n_pinned > self._n_pinned_max or len(self._pinned) > self._n_pins_max:
            self.unpin_least_recent()

    def unpin_least_recent(self) -> bool:
        """Release the pin of the least recently used session; return False if no session has a pin.

        With several clients, choose among the sessions of the client that pins the most tokens.
        """
        if not self._pinned:
            return False
        pinned = list(self._pinned.values())
        client_id = pinned[0].key[0]
        if self._shares.n_clients > 1:
            lengths: Counter[str] = Counter()
            for session in pinned:
                lengths[session.key[0]] += 0 if session.pin is None else session.pin.n_tokens
            client_id = max(lengths, key=lengths.__getitem__)
        self._unpin(next(session for session in pinned if session.key[0] == client_id))
        return True

    # --- information ---

    def info(self, session: Session) -> SessionInfo:
        """Return the state of a session."""
        kv_cache, ids = self._required_cache(), session.token_ids
        return SessionInfo(
            name=session.key[1],
            num_tokens=len(ids),
            num_cached_tokens=kv_cache.prefix_cache.match(
                session.salt, ids, len(ids), session.stream
            ).n_tokens,
            num_pinned_tokens=0 if session.pin is None else session.pin.n_tokens,
            is_restoring=session.is_restoring,
        )

    def list_info(self, client_id: str) -> list[SessionInfo]:
        """Return the state of all sessions of a client, ordered by name."""
        mine = [session for key, session in self._by_key.items() if key[0] == client_id]
        return [self.info(session) for session in sorted(mine, key=lambda session: session.key)]

    def check_invariants(self) -> None:
        """Raise BrokenInvariant if too many cells are pinned or the list of pins is wrong."""
        if self.n_pinned > self._n_pinned_max:
            raise BrokenInvariant(f"sessions pin {self.n_pinned} cells, the limit is {self._n_pinned_max}")
        if len(self._pinned) > self._n_pins_max:
            raise BrokenInvariant(f"{len(self._pinned)} sessions have a pin, allowed are {self._n_pins_max}")
        pinned = {key for key, session in self._by_key.items() if session.pin is not None}
        if pinned != self._pinned.keys():
            raise BrokenInvariant(f"{len(pinned)} sessions have a pin, {len(self._pinned)} are listed")

    # --- inside ---

    def _required_cache(self) -> KvCacheManager:
        """Return the KV cache. Raises UnsupportedError if prefix caching is off."""
        if not self._kv_cache.caches_prefixes:
            raise UnsupportedError("sessions need the prefix cache, which is off", param="session_id")
        return self._kv_cache

    def _checked_count(self, session: Session, n_tokens: int | None) -> int:
        """Return the number of tokens to keep. Raises RejectedError if the session has fewer."""
        n_max = len(session.token_ids)
        if n_tokens is not None and not 0 <= n_tokens <= n_max:
            raise RejectedError(
                f"n_tokens is {n_tokens}, session {session.key[1]!r} has {n_max}", param="n_tokens"
            )
        return n_max if n_tokens is None else n_tokens

    def _assign(self, session: Session, token_ids: array[int], salt: str, stream: int) -> None:
        session.token_ids, session.salt, session.stream = token_ids, salt, stream
        self.pin(session)

    def _unpin(self, session: Session) -> None:
        if session.pin is not None:
            self._required_cache().unpin(session.pin)
            session.pin = None
            del self._pinned[session.key]


def check_name(name: str, param: str = "session_id") -> None:
    """Raise RejectedError for an invalid name of a session or a file."""
    if _NAME.fullmatch(name) is None:
        raise RejectedError(
            f"{param} is {name[: 2 * SESSION_NAME_MAX]!r}: allowed are 1 to {SESSION_NAME_MAX} of "
            "A-Z a-z 0-9 _ . -, not beginning with . or -",
            param=param,
        )
