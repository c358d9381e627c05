"""A simulated world: the real engine, scheduler, prefix cache and KvCache with fake clients, time and tokens.

Everything follows from one seed. After every step the counts must balance and every plan must follow the
rules. Every 64 steps everything is checked. At the end each request has ended once, with the tokens that it
gets alone.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from types import SimpleNamespace
from typing import Any

from fakes.asks import ask, limits
from fakes.core import N_PLAIN, NON_FINITE, REFUSED, SamplerSpec
from kv_subscriber import FollowedBlocks
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.executor import Executor
from llaisys.engine.request import PREEMPTIONS_MAX, EngineRequest, derive_seed
from llaisys.engine.request_queue import queue_key
from llaisys.engine.scheduler import Scheduler, SchedulerOutput, SchedulerView
from llaisys.engine.worker import Worker
from llaisys.errors import ContextLengthError, QueueFullError
from llaisys.outputs import FinishReason
from sim.context import SimContext, answer

STEPS_BETWEEN_CHECKS = 64
PROMPT_MAX, OUTPUT_MAX = 256, 64
FAR_S = 600.0
# Five requests that the core rejects within a minute end the engine; a world has fewer.
N_REFUSED_MAX = 4


@dataclass(frozen=True)
class Mix:
    """The load and the capacity. Shares are of all requests; `load` is relative to the throughput."""

    n_requests: int
    n_cells: int = 2048
    n_running: int = 32
    n_streams: int = 1
    load: float = 1.0
    aborts: float = 0.14  # a tenth is canceled; the others have ended before
    deadlines: float = 0.05
    priorities: float = 0.2
    choices: float = 0.05
    shared: float = 0.4
    trouble: float = 0.01
    faults: float = 0.002
    prefix_caching: bool = True
    n_states: int | None = None  # of a model with recurrent layers, that the prefix cache may keep
    n_clients: int = 1  # that have shares; eight clients send requests


def mix_of(seed: int, n_requests: int) -> Mix:
    """Return the mix of a seed.

    Odd seeds are short of cells. There are one, two or four KV streams, loads from low to one that fills the
    queue, and some seeds without the prefix cache.
    """
    n_streams = (1, 1, 2, 4)[seed // 2 % 4]
    load = (0.8, 1.0, 1.5, 3.0, 1.0)[seed % 5]
    return Mix(
        n_requests,
        n_cells=2048 if seed % 2 == 0 else 352 * n_streams,
        n_streams=n_streams,
        load=load if seed % 2 == 0 else load / 2,
        prefix_caching=seed % 10 != 9,
    )


def prompt_length(rng: random.Random) -> int:
    """Return 1 to 256 tokens, 48 on average."""
    return min(PROMPT_MAX, 1 + int(rng.expovariate(1 / 47.8)))


def output_length(rng: random.Random) -> int:
    """Return 1 to 64 tokens, 16 on average."""
    return min(OUTPUT_MAX, 1 + int(rng.expovariate(1 / 15.8)))


@dataclass
class Fate:
    """A submitted request, and the outputs of each of its choices."""

    request: EngineRequest
    seed: int
    tokens: list[list[int]]
    reasons: list[FinishReason | None]
    ended_s: float = 0.0
    cancelled: bool = False
    n_last: int = 0


@dataclass
class World:
    """One run: `step` until `is_over`. `trace` is a digest of what happened."""

    seed: int
    mix: Mix
    now_s: float = 1000.0
    n_steps: int = 0
    n_submitted: int = 0
    n_refused: int = 0
    n_cancels: int = 0
    n_ended: dict[str, int] = field(default_factory=dict)
    trace: int = 0

    def __post_init__(self) -> None:
        mix, rng = self.mix, random.Random(self.seed)
        self.rng = rng
        self.limits = limits(
            max_num_seqs=mix.n_running,
            max_num_batched_tokens=rng.choice([64, 256, 512]),
            max_num_queued_reqs=256,
            max_model_len=PROMPT_MAX + OUTPUT_MAX,
            n_cells=mix.n_cells,
            n_streams=mix.n_streams,
            max_batch_size=rng.choice([None, None, mix.n_running // 2]),
            long_prefill_token_threshold=rng.choice([None, 32]),
            enable_prefix_caching=mix.prefix_caching,
            kv_eviction_threshold=rng.choice([1.0, 0.8]),
            timeout_scan_s=0.5,
            n_clients=mix.n_clients,
            state_bytes=int(mix.n_states is not None),
            n_states_kept=mix.n_states or 0,
        )
        self.context = SimContext(
            n_cells=mix.n_cells,
            n_seq_max=mix.n_running,
            n_streams=mix.n_streams,
            lifo=rng.random() < 0.5,
            n_states_kept=mix.n_states,
        )
        worker = Worker(self.context, SamplerSpec, mix.n_streams)  # type: ignore[arg-type]
        self.kv_events = FollowedBlocks()
        self.engine = LLMEngine(Executor(worker), self.limits, self.seed, kv_events=self.kv_events)
        self.scheduler = Scheduler()
        self.fates: dict[str, Fate] = {}  # of open requests
        self.chats: list[tuple[str, list[int]]] = []
        self.cancels: list[tuple[float, str]] = []
        self.n_core_refused = 0
        self.next_arrival_s = self.now_s
        self._specs: dict[str, SamplerSpec] = {}

    # --- clients ---

    @property
    def is_over(self) -> bool:
        return self.n_arrived >= self.mix.n_requests and not self.fates

    @property
    def n_arrived(self) -> int:
        return self.n_submitted + self.n_refused

    def arrive(self) -> None:
        """One random request; a rejection has no side effects."""
        rng, mix, name = self.rng, self.mix, f"r{self.n_arrived}"
        salt, prompt = self._prompt()
        facts: dict[str, Any] = {
            "max_tokens": output_length(rng),
            "client_id": f"c{min(int(rng.expovariate(0.5)), 7)}",
            "priority": rng.choice([-1, 1]) if rng.random() < mix.priorities else 0,
            "temperature": float(rng.random() < 0.5),
            "cache_salt": salt,
            "deadline_s": self.now_s + (rng.uniform(0.05, 2) if rng.random() < mix.deadlines else FAR_S),
        }
        if rng.random() < mix.choices:
            facts["n"] = rng.choice([2, 3, 4])
        if rng.random() < 0.3:
            facts["stop_token_ids"] = [rng.randrange(N_PLAIN) for _ in range(4)]
        if rng.random() < 0.3:
            facts["seed"] = rng.randrange(2**63)
        if rng.random() < mix.trouble:
            self._spoil(prompt, facts)
        self._join_session(prompt, facts)
        request = ask(name, prompt, arrival_s=self.now_s, **facts)
        try:
            self.engine.submit(request)
        except (QueueFullError, ContextLengthError):
            self.n_refused += 1
            return
        seed = request.params.seed
        seed = derive_seed(self.seed, self.n_submitted) if seed is None else seed
        n = request.params.n
        self.fates[name] = Fate(request, seed, [[] for _ in range(n)], [None] * n)
        self.n_submitted += 1
        if rng.random() < mix.aborts:
            heappush(self.cancels, (self.now_s + rng.expovariate(12), name))

    def _prompt(self) -> tuple[str, list[int]]:
        """Return a salt and a prompt, which often continues or edits the head of an earlier chat."""
        rng = self.rng
        n_prompt = prompt_length(rng)
        salt, prompt = rng.choice("ab"), []
        if self.chats and rng.random() < self.mix.shared:
            salt, chat = rng.choice(self.chats)
            prompt = chat[: min(n_prompt, rng.choice([len(chat), rng.randint(1, len(chat))]))]
        return salt, prompt + [rng.randrange(N_PLAIN) for _ in range(n_prompt - len(prompt))]

    def _join_session(self, prompt: list[int], facts: dict[str, Any]) -> None:
        """No request has a session here (`sim.sessions` does)."""

    def _spoil(self, prompt: list[int], facts: dict[str, Any]) -> None:
        """Make the request's row not finite, or make the core reject it, at admission or in a batch."""
        token = self.rng.choice([NON_FINITE, REFUSED])
        if token == REFUSED and facts["temperature"] > 0:
            if self.n_core_refused == N_REFUSED_MAX:
                token = NON_FINITE
            else:
                self.n_core_refused += 1
        prompt[self.rng.randrange(len(prompt))] = token

    def cancel(self, name: str) -> None:
        """Cancel a request, perhaps after its end, perhaps twice."""
        fate = self.fates.get(name)
        if fate is not None:
            fate.cancelled = True
            self.n_cancels += 1
        self.engine.cancel(name)

    # --- time ---

    def step(self) -> None:
        """Do what clients do by now, run one engine step, and check the counts."""
        rng = self.rng
        rate = 65 * self.mix.load
        while self.n_arrived < self.mix.n_requests and self.next_arrival_s <= self.now_s:
            self.arrive()
            self.next_arrival_s += rng.expovariate(rate)
        while self.cancels and self.cancels[0][0] <= self.now_s:
            self.cancel(heappop(self.cancels)[1])
        if not self.engine.has_work():
            self.now_s += 0.01
            return
        if rng.random() < self.mix.faults:
            self.context.faults = 1
        n_rows = self.context.n_rows
        for output in self._engine_step():
            self._take(output)
        self.n_steps += 1
        self._check_counts()
        if self.n_steps % STEPS_BETWEEN_CHECKS == 0:
            self.engine.check()
            self.kv_events.check(self.engine._kv_cache.prefix_cache)
            self.trace = zlib.crc32(b"%d" % self.context.digest(), self.trace)
        self.now_s += 0.004 + 0.0002 * (self.context.n_rows - n_rows)

    def run(self) -> None:
        """Run until every request has ended; then only the prefix cache has cells."""
        while not self.is_over:
            self.step()
        self.engine.check()
        stats = self.engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.kv_cells_used == stats.kv_cells_session
        assert stats.kv_cells_free + stats.kv_cells_retained == self.mix.n_cells
        assert self.context.n_seq_free == self.mix.n_running
        assert self.context.n_rows_max <= self.limits.max_num_batched_tokens

    def _engine_step(self) -> list[EngineOutput]:
        """Run one step and check its plan."""
        self.engine._scheduler = SimpleNamespace(schedule=self._plan)  # type: ignore[assignment]
        return self.engine.step(self.now_s)

    # --- rules ---

    def _plan(self, view: SchedulerView) -> SchedulerOutput:
        made, now_s = self.scheduler.schedule(view), view.now_s
        n_tokens = len(made.decode) + sum(chunk.n_tokens for chunk in made.chunks) + sum(made.drafts.values())
        assert n_tokens <= self.limits.max_num_batched_tokens
        assert len(made.decode) + len(made.chunks) <= self.limits.n_batch_slots
        assert set(made.drafts) <= set(made.decode)
        assert not (made.drafts and made.chunks), "drafts delay a prompt"
        stayed = [r for r in view.running if r.ordinal not in made.expire]
        preempted = [r for r in stayed if r.ordinal in made.preempt]
        assert len(preempted) == len(made.preempt)
        if preempted:
            assert min(stayed, key=queue_key) not in preempted, "the oldest was preempted"
            assert all(r.num_preempted < PREEMPTIONS_MAX for r in preempted), "preempted too often"
        if not stayed and any(r.source.deadline_s > now_s for r in view.waiting):
            pinned = self.engine.sessions.n_pinned  # the step is planned again without them
            assert made.admit or pinned, "nothing runs, a request waits, and none was admitted"
        if self.n_steps % STEPS_BETWEEN_CHECKS == 0:
            assert self.scheduler.schedule(view) == made, "equal views gave two plans"
        self.trace = zlib.crc32(repr((made.admit, made.preempt, made.expire)).encode(), self.trace)
        return made

    def _check_counts(self) -> None:
        stats = self.engine.stats()
        assert self.context.n_seq_free + stats.num_running == self.mix.n_running, "a sequence id is lost"
        # Siblings that wait after their leader's end have no place in the queue's limit.
        n_leaders = sum(fate.reasons[0] is None for fate in self.fates.values())
        assert n_leaders <= self.limits.max_num_queued_reqs + self.mix.n_running, "too many are open"
        assert stats.kv_cells_free == self.context.n_cells_free, "the free cells are counted wrongly"
        if not stats.num_running:
            assert stats.kv_cells_used == stats.kv_cells_session
            assert stats.kv_cells_free + stats.kv_cells_retained == self.mix.n_cells

    def _take(self, output: EngineOutput) -> None:
        """Check an output: none after an end, one end per choice, and one last output."""
        fate = self.fates[output.request_id]
        assert fate.reasons[output.index] is None, "an output after the end"
        fate.tokens[output.index] += output.new_token_ids
        fate.reasons[output.index] = reason = output.finish_reason
        assert output.num_cached_tokens < len(fate.request.prompt_token_ids)
        assert (output.error is not None) == (reason in (FinishReason.TIMEOUT, FinishReason.ERROR))
        self.trace = zlib.crc32(repr((output.request_id, output.new_token_ids, reason)).encode(), self.trace)
        if reason is None:
            assert not output.last
            return
        over = None not in fate.reasons
        assert output.last == over, "the last output is the one that ends the last choice"
        self._check_end(fate, output)
        if over:
            self._forget(fate)

    def _forget(self, fate: Fate) -> None:
        request = fate.request
        del self.fates[request.request_id]
        if fate.reasons[0] in (FinishReason.STOP, FinishReason.LENGTH):
            chat = (request.cache_salt, request.prompt_token_ids + fate.tokens[0])
            if len(self.chats) < 48:
                self.chats.append(chat)
            else:
                self.chats[self.rng.randrange(48)] = chat

    def _check_end(self, fate: Fate, output: EngineOutput) -> None:
        """Check the reason and time of an end; the tokens must be those of the request alone."""
        request, tokens, reason = fate.request, fate.tokens[output.index], output.finish_reason
        assert reason is not None
        self.n_ended[reason.value] = self.n_ended.get(reason.value, 0) + 1
        trouble = {NON_FINITE, REFUSED} & set(request.prompt_token_ids)
        late_s = self.now_s - request.deadline_s
        assert late_s <= self.limits.timeout_scan_s + 0.2, "ended long after its deadline"
        params = request.params
        spec = SamplerSpec(temperature=params.temperature, seed=fate.seed, choice=output.index)
        want = [*islice(answer(request.prompt_token_ids, spec), len(tokens))]
        assert trouble or tokens == want, "the tokens differ from those of the request alone"
        match reason:
            case FinishReason.STOP:
                assert tokens[-1] in params.stop_token_ids
                assert not set(tokens[:-1]) & set(params.stop_token_ids)
                assert output.stop_reason == tokens[-1]
            case FinishReason.LENGTH:
                assert len(tokens) == params.max_tokens
            case FinishReason.ERROR:
                assert trouble, f"a valid request failed: {output.error}"
                assert tokens == []
            case FinishReason.ABORT:
                assert fate.cancelled
            case FinishReason.TIMEOUT:
                assert late_s >= 0
                assert request.deadline_s - request.arrival_s < FAR_S, "starved"
