"""All cases, in the order in which they are run."""

from __future__ import annotations

from attack import bodies, grammars, heads, keys, responses, sockets
from attack.target import Case

CASES: tuple[Case, ...] = tuple(
    case for module in (heads, bodies, responses, grammars, sockets, keys) for case in module.GROUP.cases
)
