"""What a plan is made from, and what it says. Frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llaisys.engine.budget import StepSpeed
from llaisys.engine.fairness import FairState, WaitingQueue
from llaisys.engine.limits import Limits
from llaisys.engine.prefix import PrefixIndex
from llaisys.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The engine's state as a plan sees it; everything in it is only read.

    - `running`: in `queue_key` order. `parked`: open, and in neither list: they wait for something else.
    - `n_free`: free cells by arena. `prefix`: what is cached; None: nothing is.
    - `fair`, `speed`: what the last step left. `last_scan_s`, `last_cleanup_s`: the last looks at the
      deadlines and at the prefix cache's size.
    """

    waiting: WaitingQueue
    running: Sequence[Request]
    limits: Limits
    n_free: tuple[int, ...]
    parked: Sequence[Request] = ()
    prefix: PrefixIndex | None = None
    fair: FairState = field(default_factory=FairState)
    speed: StepSpeed = field(default_factory=StepSpeed)
    last_scan_s: float = float("-inf")
    last_cleanup_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Admit:
    """A waiting request gets a sequence in the arena `stream`, with its first `n_cached` tokens.

    They are copied or linked from the arena `source`: the cells of the sibling `fork`, else the prefix
    cache's.
    """

    ordinal: int
    stream: int = 0
    n_cached: int = 0
    source: int = 0
    fork: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Tokens `start <= i < start + n_tokens` of a request. `samples`: the last one gives the next token."""

    ordinal: int
    start: int
    n_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, in this order: end `expire`, stop `preempt`, pin the prefixes of `admit`, evict until
    `n_free_wanted` cells are free in each arena (as far as there is something to evict), give `admit` their
    sequences, then compute one token for each of `decode`, and `chunks`, in one batch.

    Requests are named by their ordinals. `short`: who found no cells, of those who run and the next in the
    queue. `lacks_cells`: more cells would have spared a preemption, or somebody who is short. `fair`: for the
    next view. `scanned`, `cleaned`: the deadlines and the prefix cache's size were looked at.

    Invariants: tokens sum to at most `max_num_batched_tokens` and requests to at most `max_batch_size`; each
    request is in at most one of `expire`, `preempt` and (once) `decode` or `chunks`; an admitted one has a
    chunk.
    """

    expire: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    n_free_wanted: tuple[int, ...] = ()
    admit: tuple[Admit, ...] = ()
    decode: tuple[int, ...] = ()
    chunks: tuple[PlannedChunk, ...] = ()
    short: tuple[int, ...] = ()
    lacks_cells: bool = False
    fair: FairState = field(default_factory=FairState)
    scanned: bool = False
    cleaned: bool = False
