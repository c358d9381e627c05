"""Drafts of a second model: the acceptance that transformers finds, and the same tokens as without drafts."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import pytest

from fakes.asks import ask
from golden import FOLDER
from llaisys import LLM, SamplingParams, _core
from llaisys.engine.request import Request
from llaisys.engine.spec_decode.draft_model import DraftModelProposer
from llaisys.engine.worker import Worker
from llaisys.errors import RejectedError

DRAFT = FOLDER.with_name("draft_qwen2_bf16")
N_DRAFTS, N_TOKENS = 4, 24


def proposer_of(n_cells: int = 1024, n_batch: int = 64, n_seqs: int = 4) -> DraftModelProposer:
    context = _core.Context(
        str(DRAFT),
        dtype="float32",
        n_cells=n_cells,
        n_seq_max=n_seqs,
        n_batch=n_batch,
        max_model_len=300,
        n_threads=1,
        nan_fill=True,
    )
    return DraftModelProposer(Worker(context, _core.SamplerSpec), n_batch, 300)


@pytest.fixture
def proposer() -> Iterator[DraftModelProposer]:
    made = proposer_of()
    yield made
    made.close()


def request(ordinal: int, prompt: list[int], output: list[int]) -> Request:
    made = Request(ask(f"{ordinal}", prompt), ordinal, 0, 1000)
    made.token_ids.extend(output)
    return made


def goldens() -> list[tuple[list[int], list[int], list[int]]]:
    """Return prompt, the target's continuation, and the accepted drafts of each round."""
    data = np.load(DRAFT / "golden.npz")
    names = ("prompt", "target_greedy", "accepted")
    return [tuple(data[f"{name}_{i}"].tolist() for name in names) for i in range(4)]  # type: ignore[misc]


def test_as_many_drafts_are_accepted_as_in_transformers(proposer: DraftModelProposer) -> None:
    """All requests at once, in rounds of four drafts. A prompt above `n_batch` tokens takes several."""
    requests = [request(i, prompt, []) for i, (prompt, _, _) in enumerate(goldens())]
    accepted: list[list[int]] = [[] for _ in requests]
    for _ in range(40):
        pending = [r for r in requests if r.num_output < N_TOKENS]
        for each, drafts in zip(pending, proposer.propose(pending, [N_DRAFTS] * len(pending)), strict=True):
            if not drafts:
                continue
            target = goldens()[each.ordinal][1][each.num_output :]
            n = 0
            while n < min(len(drafts), len(target)) and drafts[n] == target[n]:
                n += 1
            accepted[each.ordinal].append(n)
            each.token_ids.extend(target[: n + 1])
    for rounds, (_, _, want) in zip(accepted, goldens(), strict=True):
        n_left = N_TOKENS - sum(n + 1 for n in want[:-1])
        assert rounds == [
            *want[:-1],
            min(want[-1], n_left),
        ]  # the target's later tokens are not in the golden
    assert {n for rounds in accepted for n in rounds} == set(range(N_DRAFTS + 1))


def test_a_new_history_is_followed(proposer: DraftModelProposer) -> None:
    """A request that continues otherwise than drafted, or is shorter, gets the drafts of a new request."""
    prompt, target, _ = goldens()[1]
    one = request(1, prompt, target[:6])
    proposer.propose([one], [4])
    one.token_ids = array("i", [*prompt, *target[:2], 9, 9])
    assert proposer.propose([one], [4]) == proposer.propose([request(2, [*prompt, *target[:2], 9], [9])], [4])


def test_too_few_sequences_or_cells_give_fewer_drafts_and_no_error() -> None:
    prompt = goldens()[1][0]
    proposer = proposer_of(n_cells=48, n_seqs=2)
    requests = [request(i, prompt, [i]) for i in range(5)]
    for _ in range(3):
        for each in requests:
            assert len(proposer.propose([each], [4])[0]) == 4, "the least recently used one is closed"
    long = request(9, prompt * 9, [1])
    assert proposer.propose([requests[0], long], [4, 4]) == [[], []]
    assert len(proposer.propose([requests[0]], [4])[0]) == 4
    for each in [*requests, long]:
        proposer.finish(each)
    assert proposer._worker.n_seq_free == 2
    assert proposer._worker.n_cells_used == 0
    proposer.close()


def test_a_failed_draft_model_is_not_used_any_more(
    proposer: DraftModelProposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = request(1, [1, 2, 3], [4])

    def fail(*_: object) -> list[int]:
        raise RejectedError("broken")

    monkeypatch.setattr(proposer._worker, "decode_greedy", fail)
    assert proposer.propose([one], [4]) == [[]]
    monkeypatch.undo()
    assert proposer.propose([one], [4]) == [[]]


@pytest.mark.parametrize("engine_process", [False, True])
def test_llm_with_a_draft_model_gives_the_same_tokens(engine_process: bool) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in goldens()]
    params = SamplingParams(max_tokens=N_TOKENS, temperature=0.0, ignore_eos=True)
    config = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": N_DRAFTS}
    with LLM(
        str(FOLDER),
        dtype="float32",
        num_kv_cells=2048,
        speculative_config=config,
        engine_process=engine_process,
    ) as llm:
        outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == [target for _, target, _ in goldens()]
