"""A simulated world with drafts in every step: right, wrong and random ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fakes.core import N_PLAIN, SamplerSpec
from fakes.drafts import ScriptedSpeculator
from llaisys.engine.request import Request
from sim.context import answer
from sim.world import World


class DraftWorld(World):
    """A World whose requests have drafts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._outputs: dict[int, tuple[Iterator[int], list[int]]] = {}
        self.speculator = ScriptedSpeculator(self.seed, N_PLAIN, self._next_tokens)
        self.engine._speculator = self.speculator  # type: ignore[assignment]

    def _next_tokens(self, request: Request, n: int) -> Sequence[int]:
        """Return the next tokens that the request gets alone."""
        if request.ordinal not in self._outputs:
            spec = SamplerSpec(
                temperature=request.source.params.temperature, seed=request.seed, choice=request.index
            )
            self._outputs[request.ordinal] = answer(request.source.prompt_token_ids, spec), []
        rest, known = self._outputs[request.ordinal]
        while len(known) < request.num_output + n:
            known.append(next(rest))
        return known[request.num_output : request.num_output + n]
