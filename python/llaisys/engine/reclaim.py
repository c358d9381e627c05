"""Which cells of a running request no later row sees, where every layer has a sliding window. Pure.

A row at position `p` sees the positions above `p - window`, its own included. So the next row of a request
with `num_computed` tokens sees none below `num_computed + 1 - window`, and neither does any row after it
(decision 0008: what is forgotten at the old end changes no bit).
"""

from __future__ import annotations

from llaisys.engine.request import Request

# Cells go back in lots of so many: a lot costs one call, and a request holds that many too many at most.
RECLAIM_TOKENS = 64


def reclaimable(request: Request, window: int) -> int:
    """Positions of a running request below this one can go; 0: too few can.

    Cells that the prefix cache or a sibling holds too go all at once or stay: a request pins a whole path.
    """
    end = request.num_computed + 1 - window
    return end if end >= max(request.num_shared, request.num_reclaimed + RECLAIM_TOKENS) else 0


def most_cells(window: int, max_num_batched_tokens: int) -> int:
    """Cells of its own that a request which reclaims after each step holds at most, in the step included."""
    return window + RECLAIM_TOKENS + max_num_batched_tokens
