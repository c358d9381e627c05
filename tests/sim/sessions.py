"""A simulated world with sessions: created, used, forked, trimmed and deleted while cells are short."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from fakes.core import N_PLAIN
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.scheduler import SchedulerOutput, SchedulerView
from llaisys.engine.sessions.manager import SessionKey, SessionRequest
from llaisys.errors import RejectedError
from llaisys.outputs import FinishReason
from sim.world import PROMPT_MAX, Fate, World

NAMES = ("a", "b", "c")
STEPS_BETWEEN_SESSION_CHECKS = 8
USES, CALLS = 0.5, 0.3  # shares of requests that name a session, and of steps with a call


@dataclass
class SessionWorld(World):
    """`tokens`: the expected tokens of each session.

    Every few steps each session must have its tokens, and its pinned tokens must be cached. No request is
    preempted while a session pins anything.
    """

    tokens: dict[SessionKey, list[int]] = field(default_factory=dict)
    n_calls: dict[str, int] = field(default_factory=dict)
    n_lost_pins: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Separate random numbers, so that the same requests arrive with and without sessions.
        self.session_rng = random.Random(self.seed + 2**32)
        self._ended: dict[SessionKey, list[tuple[int, list[int]]]] = {}
        self._short = False

    # --- clients ---

    def _join_session(self, prompt: list[int], facts: dict[str, Any]) -> None:
        """Let a request often name a session, and then often continue its tokens."""
        rng, client_id = self.session_rng, facts["client_id"]
        if rng.random() >= USES:
            return
        facts["session_id"] = name = rng.choice(NAMES)
        tokens = self.tokens.get((client_id, name), [])
        if tokens and rng.random() < 0.7:
            facts["cache_salt"] = self.engine.sessions.find(client_id, name).salt
            new = [rng.randrange(N_PLAIN) for _ in range(rng.randint(1, 24))]
            prompt[:] = [*tokens[: PROMPT_MAX - len(new)], *new]

    def arrive(self) -> None:
        """Submit a request; if it is accepted, it creates its session."""
        super().arrive()
        fate = self.fates.get(f"r{self.n_arrived - 1}")
        if fate is not None and fate.request.session_id:
            self.tokens.setdefault((fate.request.client_id, fate.request.session_id), [])

    def call(self) -> None:
        """Make a session request. It moves no cell; it is rejected exactly if a name or token is missing."""
        rng = self.session_rng
        kind = rng.choice(["create", "fork", "fork", "trim", "delete", "list"])
        client_id, name, other = f"c{rng.randrange(8)}", rng.choice(NAMES), rng.choice(NAMES)
        key, new = (client_id, name), (client_id, other)
        have = self.tokens.get(key)
        n_tokens = None if rng.random() < 0.3 and kind == "fork" else rng.randint(0, len(have or ()) + 1)
        is_good = {"list": True, "create": have is None}.get(kind, have is not None)
        if kind in ("fork", "trim") and have is not None:
            is_good = n_tokens is None or n_tokens <= len(have)
        if kind == "fork":
            is_good = is_good and new not in self.tokens
        n_free = self.context.n_cells_free
        call = SessionRequest(kind=kind, client_id=client_id, name=name, other=other, n_tokens=n_tokens)  # type: ignore[arg-type]
        self.engine.session_requests.handle(call)
        (reply,) = self.engine.session_requests.pop_replies()
        assert self.context.n_cells_free == n_free, "a call moved cells"
        assert (reply.error is None) == is_good, (kind, reply.error)
        self.n_calls[kind] = self.n_calls.get(kind, 0) + 1
        if not is_good:
            assert isinstance(reply.error, RejectedError)
            return
        match kind:
            case "create":
                self.tokens[key] = []
            case "fork":
                self.tokens[new] = (have or [])[:n_tokens]
            case "trim":
                self.tokens[key] = (have or [])[:n_tokens]
            case "delete":
                del self.tokens[key]

    # --- time ---

    def step(self) -> None:
        if self.session_rng.random() < CALLS:
            self.call()
        super().step()
        for key, could in self._ended.items():
            if key in self.tokens:
                now = self.engine.sessions.find(*key).token_ids.tolist()
                whole = [each for n_least, each in could if n_least <= len(now)]
                good = now == self.tokens[key] or any(now == each[: len(now)] for each in whole)
                assert good, "a session has tokens that none of its requests computed"
                self.tokens[key] = now
        self._ended.clear()
        if self.n_steps % STEPS_BETWEEN_SESSION_CHECKS == 0:
            self._check_sessions()

    def run(self) -> None:
        """Run to the end, then delete all sessions: no cell stays in use."""
        super().run()
        for key in self.tokens:
            self.engine.sessions.delete(self.engine.sessions.find(*key))
        self.engine.check()
        assert self.engine.stats().kv_cells_used == 0

    def _engine_step(self) -> list[EngineOutput]:
        outputs = super()._engine_step()
        assert not self._short, "a request was preempted, or found no cells, while a session pinned cells"
        return outputs

    def _plan(self, view: SchedulerView) -> SchedulerOutput:
        made = super()._plan(view)
        lacks = bool(made.preempt or made.without_cells)
        self.n_lost_pins += self._short
        self._short = lacks and any(s.pin is not None for s in self._sessions())
        return made

    def _check_end(self, fate: Fate, output: EngineOutput) -> None:
        """Update the expected tokens: after a good end what was computed, after another end perhaps less."""
        super()._check_end(fate, output)
        request, tokens = fate.request, fate.tokens[0]
        key = (request.client_id, request.session_id)
        if output.index or not request.session_id or key not in self.tokens:
            return
        everything, n_least = [*request.prompt_token_ids, *tokens], len(request.prompt_token_ids)
        match output.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self.tokens[key] = everything[:-1]
                self._ended[key] = []
            case FinishReason.ABORT | FinishReason.TIMEOUT:
                self._ended.setdefault(key, []).append((n_least, everything))

    def _sessions(self) -> list[Any]:
        return [*self.engine.sessions._by_key.values()]

    def _check_sessions(self) -> None:
        sessions, cache = self.engine.sessions, self.engine._kv_cache.prefix_cache
        sessions.check_invariants()
        assert len(sessions) == len(self.tokens)
        for session in self._sessions():
            assert session.token_ids.tolist() == self.tokens[session.key]
            if session.pin is not None:
                n, ids = session.pin.n_tokens, session.token_ids
                match = cache.match(session.salt, ids, n, session.stream)
                assert match.n_tokens == n <= len(ids), "pinned tokens of a session were evicted"
