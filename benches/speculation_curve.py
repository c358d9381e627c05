"""Measure speculative decoding with scripted drafts: the speed by the share of drafts that are right.

    python benches/speculation_curve.py [--rounds 5] [--streams 1 2 4 8] [--weights bf16 int8]

The model has Qwen2.5-0.5B's shape and random weights (`peers_models.py`). The tokens of each prompt are
recorded without speculation. A proposer then drafts the recorded tokens. Each of them is wrong with the
probability 1 - acceptance, drawn from a seed. `drafts` is `planner` or a fixed number of drafts per request
and step. The engine's own planner chooses how many drafts a step verifies, up to the default of
`num_speculative_tokens`. Fixed numbers are measured where a step has up to 16 rows, the engine's limit.

Each line of `benches/results/speculation-curve.jsonl` is one pair: a call without and a call with
speculation, of two engines that take turns. The prompts are in the prefix cache, so the seconds are those of
decoding. `ratio` is the seconds without divided by the seconds with speculation. `verified` and `accepted`
count drafts. `equal`: completions with the same tokens, which must be all `streams` of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from llaisys import LLM, SamplingParams
from llaisys.config.speculative_config import SpeculativeConfig
from llaisys.engine import loop
from llaisys.engine.request import Request
from llaisys.engine.spec_decode.planner import ROWS_MAX, CostCurve, DraftPlanner
from llaisys.engine.spec_decode.proposer import HostProposer
from llaisys.engine.spec_decode.speculator import Speculator, make_speculator
from llaisys.engine.step_speed import DecodeStep
from peers import cpu_name
from peers_engines import MODELS
from peers_models import CONFIG, write_folder

RESULTS = Path(__file__).parent / "results" / "speculation-curve.jsonl"
WEIGHTS = {"bf16": None, "int8": "int8"}
ACCEPTANCES = (0, 50, 80, 100)
FIXED = (1, 2, 4, 8)
N_PROMPT = 64
VOCAB = 49000  # below the special tokens
SEED = 20


class ScriptedProposer(HostProposer):
    """Proposes recorded tokens. `acceptance`: the percentage of right drafts."""

    def __init__(self, recorded: dict[tuple[int, ...], list[int]], acceptance: int) -> None:
        self._recorded = recorded
        self._acceptance = acceptance
        self._scripts: dict[int, list[int]] = {}

    def finish(self, request: Request) -> None:
        """Drop the script of a request."""
        self._scripts.pop(request.ordinal, None)

    def _drafts(self, request: Request, budget: int) -> list[int]:
        script = self._scripts.get(request.ordinal)
        if script is None:
            script = self._scripts[request.ordinal] = self._script(request)
        return script[request.num_output : request.num_output + budget]

    def _script(self, request: Request) -> list[int]:
        """Return the drafts of all positions. The draws of a prompt are the same for every acceptance."""
        prompt = tuple(request.source.prompt_token_ids)
        rng = random.Random(f"{SEED}: {prompt}")
        right = self._recorded[prompt]
        return [
            token if 100 * rng.random() < self._acceptance else (token + 1) % CONFIG["vocab_size"]
            for token in right
        ]


class FixedPlanner(DraftPlanner):
    """Verifies all proposed drafts in every step, whatever they cost."""

    def __init__(self) -> None:
        super().__init__(CostCurve({1: 1.0}))

    def plan(
        self,
        n_rows: int,  # noqa: ARG002 -- as the planner's
        proposed: dict[int, int],
        seconds_per_draft: float = 0.0,  # noqa: ARG002 -- as above
    ) -> dict[int, int]:
        """Return the number of drafts by ordinal."""
        return proposed


class SwitchedSpeculator:
    """The speculators of all measured cases in one engine.

    `case` selects the one in use. Set it only while no request is open.
    """

    def __init__(self, speculators: dict[tuple[int, str], Speculator]) -> None:
        self._speculators = speculators
        self.case = next(iter(speculators))
        self.n_verified = self.n_accepted = 0

    def propose(
        self, running: Sequence[Request], n_slots: int, last_step: DecodeStep | None
    ) -> dict[int, list[int]]:
        """Return the drafts of running requests by ordinal."""
        return self._speculators[self.case].propose(running, n_slots, last_step)

    def record_accepted(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        """Count verified and accepted drafts."""
        self.n_verified += n_drafts
        self.n_accepted += n_accepted
        self._speculators[self.case].record_accepted(request, n_drafts, n_accepted)

    def finish(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        self._speculators[self.case].finish(request)

    def close(self) -> None:
        """Free the proposers."""
        for speculator in self._speculators.values():
            speculator.close()

    def totals(self) -> dict[str, Any]:
        """Return the totals of the case in use."""
        return self._speculators[self.case].totals()


class Pair:
    """Two engines of one model, without and with speculation, and the recorded tokens."""

    def __init__(
        self, model: Path, quantization: str | None, streams: int, cases: list[tuple[int, str]]
    ) -> None:
        self._recorded: dict[tuple[int, ...], list[int]] = {}
        self._cases = cases
        settings = {
            "quantization": quantization,
            "max_num_seqs": streams,
            "max_model_len": 1024,
            "num_kv_cells": 16 * 1024,
        }
        self._without = LLM(str(model), speculative_config=None, **settings)
        with patch.object(loop, "make_speculator", self._make_speculator):
            self._with = LLM(str(model), speculative_config={"method": "ngram"}, **settings)

    def _make_speculator(
        self, config: SpeculativeConfig, decode_seconds: Any, draft_model: Any
    ) -> SwitchedSpeculator:
        """Build a speculator for each case, with the scripted proposer in place of a draft model."""
        assert draft_model is None
        speculators = {}
        for acceptance, drafts in self._cases:
            proposer = ScriptedProposer(self._recorded, acceptance)
            if drafts == "planner":
                speculator = make_speculator(config, decode_seconds, proposer)
            else:
                speculator = Speculator(proposer, FixedPlanner(), int(drafts))
            speculators[acceptance, drafts] = speculator
        self._speculator = SwitchedSpeculator(speculators)
        return self._speculator

    def record(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Record the tokens without speculation, and compute the prompts in both engines."""
        for prompt, ids in zip(prompts, _generate(self._without, prompts, max_tokens), strict=True):
            self._recorded[tuple(prompt)] = ids
        _generate(self._with, prompts, 1)

    def measure(
        self, prompts: Sequence[list[int]], max_tokens: int, case: tuple[int, str], *, starts_with: bool
    ) -> dict[str, Any]:
        """Measure one pair. `starts_with`: the engine with speculation runs first."""
        switched = self._speculator
        switched.case, switched.n_verified, switched.n_accepted = case, 0, 0
        seconds, ids = {}, {}
        for speculates in (True, False) if starts_with else (False, True):
            engine = self._with if speculates else self._without
            begin_s = time.perf_counter()
            ids[speculates] = _generate(engine, prompts, max_tokens)
            seconds[speculates] = time.perf_counter() - begin_s
        n_tokens = sum(map(len, ids[False]))
        return {
            "tokens": n_tokens,
            "seconds_without": round(seconds[False], 3),
            "seconds_with": round(seconds[True], 3),
            "ratio": round(seconds[False] / seconds[True], 3),
            "verified": switched.n_verified,
            "accepted": switched.n_accepted,
            "equal": sum(a == b for a, b in zip(ids[True], ids[False], strict=True)),
        }

    def close(self) -> None:
        """Free both engines."""
        self._without.close()
        self._with.close()


def _generate(engine: LLM, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Return greedy completions of exactly `max_tokens` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        list(output.outputs[0].token_ids) for output in engine.generate([*prompts], params, use_tqdm=False)
    ]


def cases_of(streams: int, fixed: Sequence[int]) -> list[tuple[int, str]]:
    """Return acceptance and number of drafts of each case; fixed numbers only if they fit into a step."""
    fitting = [str(n) for n in fixed if streams * (1 + n) <= ROWS_MAX]
    return [(acceptance, drafts) for acceptance in ACCEPTANCES for drafts in ("planner", *fitting)]


def measure(model: Path, weights: str, streams: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the pairs of all rounds, after one unreported pair of each case that the planners adapt in."""
    rng = random.Random(SEED)
    prompts = [[rng.randrange(VOCAB) for _ in range(N_PROMPT)] for _ in range(streams)]
    cases = cases_of(streams, args.fixed)
    pair = Pair(model, WEIGHTS[weights], streams, cases)
    pair.record(prompts, args.max_tokens)
    for round_ in range(-1, args.rounds):
        for i, (acceptance, drafts) in enumerate(cases):
            case = (acceptance, drafts)
            measured = pair.measure(prompts, args.max_tokens, case, starts_with=(round_ + i) % 2 == 1)
            if round_ >= 0:
                named = {"weights": weights, "streams": streams, "acceptance": acceptance, "drafts": drafts}
                yield {**named, "round": round_, **measured}
    pair.close()


def table(pairs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line per weights, streams and drafts with the median ratio at each acceptance."""
    rows = dict.fromkeys((p["weights"], p["streams"], p["drafts"]) for p in pairs)
    for weights, streams, drafts in rows:
        of = [p for p in pairs if (p["weights"], p["streams"], p["drafts"]) == (weights, streams, drafts)]
        rate = statistics.median(p["tokens"] / p["seconds_without"] for p in of)
        shown = "".join(
            f"  {acceptance:3} %: {statistics.median(ratios):.2f}"
            for acceptance in ACCEPTANCES
            if (ratios := [p["ratio"] for p in of if p["acceptance"] == acceptance])
        )
        name = drafts if drafts == "planner" else f"{drafts} drafts"
        yield f"{weights}  {streams} streams  {name:9} {rate:6.1f} tokens per second without, ratio{shown}"


def main() -> None:
    """Measure all pairs, write them and print the median ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--weights", nargs="+", choices=[*WEIGHTS], default=[*WEIGHTS])
    parser.add_argument(
        "--fixed",
        nargs="*",
        type=int,
        default=list(FIXED),
        help="fixed numbers of drafts; none: planner only",
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    model = MODELS / "q05"
    if not (model / "model.safetensors").exists():
        write_folder(model)
    machine = {"machine": cpu_name()}
    pairs = []
    for weights in args.weights:
        for streams in args.streams:
            of = [{**machine, **each} for each in measure(model, weights, streams, args)]
            print("\n".join(table(of)), flush=True)
            pairs += of
            args.output.write_text("".join(json.dumps(each) + "\n" for each in pairs), "utf-8")
    n_equal, n_all = (sum(p[key] for p in pairs) for key in ("equal", "streams"))
    print(f"equal completions: {n_equal} of {n_all}")
    if n_equal != n_all:
        raise SystemExit("speculation changed tokens")


if __name__ == "__main__":
    main()
