"""LLM.embed, encode and score on the fake core, with vLLM's arguments and outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fakes import core, text
from llaisys import (
    LLM,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    RejectedError,
    RequestFailedError,
    ScoringRequestOutput,
    UnsupportedError,
)
from llaisys.lora_request import LoRARequest
from llaisys.model_assets import ModelAssets
from llaisys.text.reranker import YesNoReranker

pytestmark = pytest.mark.usefixtures("fake_model")


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("fake", num_kv_cells=1024) as made:
        yield made


def vector(ids: list[int]) -> list[float]:
    """Return the embedding of a prompt by its definition: the last hidden state, with norm 1."""
    last = np.array(core.hidden_of(ids), np.float32).tolist()
    length = math.sqrt(math.fsum(x * x for x in last))
    return np.array([x / length for x in last], np.float32).tolist()


def cosine(a: list[int], b: list[int]) -> float:
    return float(np.dot(np.array(vector(a), np.float64), np.array(vector(b), np.float64)))


def test_embeddings_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[i % 200, 1, 2] for i in range(300)]
    outputs = llm.embed(prompts)
    assert [output.outputs.embedding for output in outputs] == [vector(ids) for ids in prompts]
    assert all(isinstance(output, EmbeddingRequestOutput) and output.finished for output in outputs)
    assert outputs[0].outputs.hidden_size == core.D_MODEL
    assert outputs[0].prompt_token_ids == prompts[0]
    (one,) = llm.embed("hi")
    assert one.prompt_token_ids == text.tokenizer().encode("hi", True)


def test_encode_needs_a_task(llm: LLM) -> None:
    (output,) = llm.encode([1, 2], pooling_task="embed")
    assert isinstance(output, PoolingRequestOutput)
    assert output.outputs.data.dtype == np.float32
    assert output.outputs.data.tolist() == vector([1, 2])
    assert output.outputs == PoolingOutput(np.array(vector([1, 2]), np.float32))
    with pytest.raises(RejectedError, match="pooling_task is required"):
        llm.encode([1, 2])
    for task in ("classify", "token_embed"):
        with pytest.raises(UnsupportedError, match=task):
            llm.encode([1, 2], pooling_task=task)


def test_scores_are_cosine_similarities(llm: LLM) -> None:
    query, texts = [1, 2, 3], [[4, 5], [1, 2, 3], [6]]
    scores = llm.score(query, texts)
    assert [each.outputs.score for each in scores] == pytest.approx([cosine(query, each) for each in texts])
    assert scores[1].outputs.score == pytest.approx(1.0)
    assert scores[0].prompt_token_ids == [1, 2, 3, 4, 5]
    assert isinstance(scores[0], ScoringRequestOutput)
    pairs = llm.score([[1], [2], [3]], texts)
    assert [each.outputs.score for each in pairs] == pytest.approx(
        [cosine([i + 1], each) for i, each in enumerate(texts)]
    )
    for wrong in (([[1], [2]], texts), ([], texts), (query, [])):
        with pytest.raises(RejectedError, match="cannot be paired"):
            llm.score(*wrong)


def test_a_reranker_scores_pairs_and_needs_texts(fake_model: ModelAssets) -> None:
    made = text.tokenizer()
    fixed = tuple(made.encode("<", False)), tuple(made.encode(">", False))
    reranker = YesNoReranker(*fixed, token_ids=(5, 3))
    with LLM("fake", num_kv_cells=1024) as llm:
        llm._model = llm._engine.model = replace(fake_model, reranker=reranker)
        outputs = llm.score("a", ["b", "c"])
        for document, output in zip("bc", outputs, strict=True):
            ids = [*fixed[0], *made.encode(reranker.body("a", document, None), False), *fixed[1]]
            assert output.prompt_token_ids == ids
            no, yes = (math.exp(core.prompt_logprob(ids, id)) for id in (5, 3))
            assert output.outputs.score == pytest.approx(yes / (no + yes), rel=1e-6)
        with pytest.raises(RejectedError, match="texts, not token ids"):
            llm.score([1], [2])


def test_pooling_params(llm: LLM) -> None:
    params = PoolingParams(
        truncate_prompt_tokens=2, dimensions=llm.model_info.d_model, normalize=True, task="embed"
    )
    (output,) = llm.embed([[1, 2, 3]], pooling_params=params)
    assert output.prompt_token_ids == [2, 3]
    assert len(llm.embed([[1], [2]], pooling_params=[params, PoolingParams()])) == 2
    (raw,) = llm.embed([[1, 2]], pooling_params=PoolingParams(normalize=False))
    assert raw.outputs.embedding == np.array(core.hidden_of([1, 2]), np.float32).tolist()
    (long,) = llm.embed([[1] * 500], pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert len(long.prompt_token_ids) == llm.max_model_len - 1
    with pytest.raises(RejectedError, match="2 prompts and 1 pooling_params"):
        llm.embed([[1], [2]], pooling_params=[params])
    with pytest.raises(UnsupportedError, match="dimensions is 7"):
        llm.embed([1], pooling_params=PoolingParams(dimensions=7))
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"normalize": 1}, RejectedError),
        ({"task": "score"}, UnsupportedError),
        ({"truncate_prompt_tokens": 0}, RejectedError),
    ]
    for fields, error in wrong:
        with pytest.raises(error):
            PoolingParams(**fields)


def test_a_prompt_without_an_embedding_is_an_error(llm: LLM) -> None:
    with pytest.raises(RequestFailedError, match="prompt 1 has no embedding"):
        llm.embed([[1], [core.NON_FINITE]])
    assert len(llm.embed([1])) == 1


def test_arguments_of_vllm_without_a_meaning_here(llm: LLM) -> None:
    for call in (
        lambda **given: llm.embed("a", **given),
        lambda **given: llm.encode("a", pooling_task="embed", **given),
        lambda **given: llm.score("a", "b", **given),
    ):
        with pytest.raises(UnsupportedError, match="tokenization_kwargs"):
            call(tokenization_kwargs={"x": 1})  # type: ignore[no-untyped-call]
        with pytest.raises(UnsupportedError, match="LoRA is off; set enable_lora"):
            call(lora_request=LoRARequest("x", 1, "/x"))  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedError, match="chat_template"):
        llm.score("a", "b", chat_template="{{ x }}")


def test_the_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.embed([[1], [2]])
    assert "2/2" in capsys.readouterr().err
    llm.score([1], [2], use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_closed_llm() -> None:
    with LLM("fake") as made:
        pass
    for call in (lambda: made.embed([1]), lambda: made.reset_prefix_cache()):
        with pytest.raises(RejectedError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("facts", "pooling", "names"),
    [
        ({}, "score", "does not score pairs"),
        ({"generates": False}, None, "has no head that generates text"),
        ({"generates": False, "is_encoder": True}, None, "is an encoder, which generates no text"),
        ({"generates": False, "is_encoder": True, "has_score_head": True}, "mean", "has no embeddings"),
        ({"generates": False, "is_encoder": True}, "score", "use it for embeddings"),
    ],
)
def test_a_task_that_the_model_cannot_do_is_refused_by_name(
    fake_model: ModelAssets, facts: dict[str, Any], pooling: Any, names: str
) -> None:
    model = replace(fake_model, info=replace(fake_model.info, **facts))
    with pytest.raises(UnsupportedError, match=names):
        model.check_task(pooling)
