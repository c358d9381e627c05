"""Where chunks of a prompt end in a model with recurrent layers, and which of these states are kept. Pure.

A request can continue from a cached prefix only where a recurrent state is kept, and a state exists only
where a step ended. So a chunk of a prompt ends where a later request is likely to continue:

- shortly before the end of the prompt, because the next turn of a chat renders the tokens that begin its
  answer in another way, and because the same prompt may come again;
- where the cached tokens of the prompt end, because several requests share them.

Ends of chunks of a long prompt are kept, too, at wide distances. States after whole prompts and outputs cost
no stop.
"""

from __future__ import annotations

from llaisys.engine.request import Request

# A chat template ends a prompt with up to this many tokens that the next turn may render in another way.
TAIL_TOKENS = 16
# A stop costs one more step. It is made only if it lets a later request save this many tokens.
SAVED_TOKENS_MIN = 64
# Minimum distance of other kept states, and their maximum number in one prompt.
SPACING_TOKENS = 512
N_SPACED_MAX = 8


def state_stops(request: Request, n_cached: int, n_same: int) -> tuple[int, ...]:
    """Return the positions at which chunks of an admitted request end, ascending.

    Its first `n_cached` tokens are computed. The prefix cache has its first `n_same`, some of them without a
    state.
    """
    stops = {n_same, request.num_prompt - TAIL_TOKENS}
    return tuple(sorted(stop for stop in stops if stop - n_cached >= SAVED_TOKENS_MIN))


def next_stop(stops: tuple[int, ...], position: int) -> int | None:
    """Return the first stop after a position; None if there is none."""
    return next((stop for stop in stops if stop > position), None)


def keeps_state(request: Request) -> bool:
    """Return True if the state after the computed part of a prompt is worth keeping."""
    spacing = max(SPACING_TOKENS, request.num_prompt // N_SPACED_MAX)
    return request.num_computed in request.state_stops or request.num_own >= spacing
