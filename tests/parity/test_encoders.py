"""Encoders and rerankers: hidden states, vectors and scores of transformers, with equal bits in any batch."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llaisys import LLM, PoolingParams, UnsupportedError
from llaisys._core import Encoder, available_isas
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.engine.worker import inspect_model
from llaisys.errors import LlaisysError, RejectedError
from llaisys.sampling_params import SamplingParams
from parity.checkpoints import read_weights
from parity.test_goldens import GOLDENS, TOLERANCE

BERT, XLM_R, MODERN = "bert_embed_f32", "xlm_roberta_rerank_f16", "modernbert_embed_bf16"
QWEN_EMBED, QWEN_RERANK = "qwen3_embed_bf16", "qwen3_rerank_bf16"
ENCODERS = [BERT, XLM_R, MODERN]
POOLING = {BERT: "mean", MODERN: "cls", QWEN_EMBED: "last"}
F32 = NDArray[np.float32]


def golden(folder: str) -> list[dict[str, Any]]:
    """Return the arrays of each input, without their number, and its text or texts (None: random ids)."""
    data = np.load(GOLDENS / folder / "golden.npz")
    n = sum(name.startswith("prompt_") for name in data.files)
    path = GOLDENS / folder / "texts.json"
    texts = json.loads(path.read_text("utf-8")) if path.exists() else [None] * n
    names = {name.rsplit("_", 1)[0] for name in data.files if name[-1].isdecimal()}
    return [
        {name: data[f"{name}_{i}"] for name in names if f"{name}_{i}" in data.files} | {"text": texts[i]}
        for i in range(n)
    ]


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[Encoder]:
    settings = {"dtype": "float32", "n_batch": 1024, "max_model_len": 256, "n_threads": 2, **settings}
    encoder = Encoder(str(folder), **settings)
    try:
        yield encoder
    finally:
        encoder.close()


def encode(
    encoder: Encoder, prompts: list[Any], types: list[Any] | None = None
) -> tuple[list[F32], F32 | None]:
    """Return the hidden states of each prompt, and the scores."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = np.concatenate(prompts).astype(np.int32)
    flat = np.concatenate(types).astype(np.int32) if types else np.zeros(0, np.int32)
    hidden, scores = encoder.encode(tokens, flat, np.array(lengths, np.int64))
    return np.split(hidden, np.cumsum(lengths)[:-1]), scores


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("folder", ENCODERS)
def test_hidden_states_and_scores_are_those_of_transformers(folder: str, isa: str) -> None:
    inputs = golden(folder)
    types = [each["types"] for each in inputs] if folder == BERT else None
    with opened(GOLDENS / folder, isa=isa) as encoder:
        hidden, scores = encode(encoder, [each["prompt"] for each in inputs], types)
    assert (scores is not None) == (folder == XLM_R)
    for i, (each, got) in enumerate(zip(inputs, hidden, strict=True)):
        want = each["hidden"]
        assert np.abs(got[each["rows"]] - want).max() <= TOLERANCE * np.abs(want).max()
        if scores is not None:
            assert abs(scores[i] - each["logit"][0]) <= TOLERANCE * max(1.0, abs(each["logit"][0]))


@pytest.mark.parametrize("folder", ENCODERS)
def test_a_text_has_the_same_bits_in_any_batch_on_any_number_of_threads(folder: str) -> None:
    prompts = [each["prompt"] for each in golden(folder)]
    with opened(GOLDENS / folder) as encoder:
        together, scores = encode(encoder, prompts)
        turned, _ = encode(encoder, prompts[::-1])
        alone = [encode(encoder, [prompt]) for prompt in prompts]
    with opened(GOLDENS / folder, n_threads=1) as encoder:
        single, _ = encode(encoder, prompts)
    for i, want in enumerate(together):
        for got in (turned[-1 - i], alone[i][0][0], single[i]):
            assert got.tobytes() == want.tobytes()
        if scores is not None:
            assert alone[i][1] == scores[i : i + 1]


@pytest.mark.parametrize("folder", [BERT, MODERN, QWEN_EMBED])
def test_embeddings_follow_the_sentence_transformers_files(folder: str) -> None:
    inputs = golden(folder)
    with LLM(str(GOLDENS / folder), dtype="float32") as llm:
        ids = [each["prompt"].tolist() for each in inputs]
        outputs = llm.embed(ids, use_tqdm=False)
        texts = [(each["text"], each) for each in inputs if each["text"] is not None]
        by_text = llm.embed([text for text, _ in texts], use_tqdm=False)
    for each, output in zip(inputs, outputs, strict=True):
        if "types" in each and each["types"].any():
            continue  # a prompt of one text has only one token type
        want = each[f"pooled_{POOLING[folder]}"]
        assert np.abs(np.array(output.outputs.embedding) - want).max() < 2e-4
    for (_, each), output in zip(texts, by_text, strict=True):
        assert output.prompt_token_ids == each["prompt"].tolist()
        assert np.abs(np.array(output.outputs.embedding) - each[f"pooled_{POOLING[folder]}"]).max() < 2e-4


def test_a_cross_encoder_scores_pairs() -> None:
    pairs = [each for each in golden(XLM_R) if each["text"] is not None]
    with LLM(str(GOLDENS / XLM_R), dtype="float32") as llm:
        queries, documents = zip(*(each["text"] for each in pairs), strict=True)
        outputs = llm.score([*queries], [*documents], use_tqdm=False)
    for each, output in zip(pairs, outputs, strict=True):
        assert output.prompt_token_ids == each["prompt"].tolist()
        assert output.outputs.score == pytest.approx(float(each["score"][0]), abs=1e-4)


async def test_qwen3_reranker_scores_by_yes_and_no(tmp_path: Path) -> None:
    data = np.load(GOLDENS / QWEN_RERANK / "golden.npz")
    yes, no = data["yes_no"].tolist()
    folder = with_config(tmp_path, QWEN_RERANK, classifier_from_token=["n", "y"])
    service = await AsyncLLM.start(Config(model=str(folder), dtype="float32", num_kv_cells=2048))
    try:
        assert service.scores_pairs
        assert service._model.score_token_ids("score") == (no, yes)
        for i in range(4):
            prompt = data[f"prompt_{i}"].tolist()
            outputs = service.generate(prompt, SamplingParams(), f"r{i}", pooling="score")
            (output,) = [each async for each in outputs]
            assert output.score == pytest.approx(float(data[f"score_{i}"]), abs=1e-4)
    finally:
        await service.close()


def with_config(target: Path, folder: str, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Copy a golden folder and change its `config.json`."""
    copy = target / "model"
    shutil.copytree(GOLDENS / folder, copy)
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config = {name: value for name, value in {**config, **changes}.items() if name not in drop}
    (copy / "config.json").write_text(json.dumps(config), "utf-8")
    return copy


def write_safetensors(path: Path, tensors: dict[str, F32]) -> None:
    header, data = {}, b""
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values, np.float32).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(("folder", "pools_mean"), [(BERT, False), (MODERN, False), (MODERN, True)])
def test_classifiers_of_bert_and_modernbert(tmp_path: Path, folder: str, pools_mean: bool) -> None:
    """The golden encoder with a random head, whose definition is computed in float64."""
    is_bert = folder == BERT
    name = "BertForSequenceClassification" if is_bert else "ModernBertForSequenceClassification"
    pooled = {"classifier_pooling": "mean"} if pools_mean else {}
    target = with_config(tmp_path, folder, architectures=[name], **pooled)
    random, d = np.random.default_rng(5), 48
    head = {
        f"{'bert.pooler' if is_bert else 'head'}.dense.weight": random.normal(size=(d, d)) / 5,
        "classifier.weight": random.normal(size=(1, d)),
        "classifier.bias": random.normal(size=1),
    }
    if is_bert:
        head["bert.pooler.dense.bias"] = random.normal(size=d)
    else:
        head["head.norm.weight"] = random.normal(size=d)
    head = {key: value.astype(np.float32) for key, value in head.items()}
    prefix = "bert." if is_bert else "model."
    weights = read_weights(GOLDENS / folder / "model.safetensors")
    encoder_weights = {prefix + key: value for key, value in weights.items() if not key.startswith("pooler.")}
    write_safetensors(target / "model.safetensors", encoder_weights | head)
    assert inspect_model(target).has_score_head
    prompts = [each["prompt"] for each in golden(folder)]
    with opened(target) as encoder:
        hidden, scores = encode(encoder, prompts)
    assert scores is not None
    for rows, score in zip(hidden, scores.tolist(), strict=True):
        x = (rows.mean(axis=0) if pools_mean else rows[0]).astype(np.float64)
        if is_bert:
            x = np.tanh(head["bert.pooler.dense.weight"] @ x + head["bert.pooler.dense.bias"])
        else:
            x = gelu(head["head.dense.weight"] @ x)
            x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * head["head.norm.weight"]
        want = float(head["classifier.weight"][0] @ x + head["classifier.bias"][0])
        assert score == pytest.approx(want, abs=1e-4)


def gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / 2 * (1 + np.array([math.erf(each / np.sqrt(2)) for each in x]))


def test_names_of_old_checkpoints(tmp_path: Path) -> None:
    """A prefix, gamma and beta, saved position ids and the head for masked tokens change nothing."""
    target = with_config(tmp_path, BERT, architectures=["BertForMaskedLM"])
    weights = read_weights(GOLDENS / BERT / "model.safetensors")
    old = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): w
        for name, w in weights.items()
    }
    more = {"cls.predictions.bias": np.zeros(600, np.float32)}
    write_safetensors(target / "model.safetensors", old | more)
    prompts = [each["prompt"] for each in golden(BERT)]
    with opened(GOLDENS / BERT) as one, opened(target) as two:
        want, _ = encode(one, prompts)
        got, _ = encode(two, prompts)
    assert [rows.tobytes() for rows in got] == [rows.tobytes() for rows in want]


def test_the_spelling_of_transformers_5(tmp_path: Path) -> None:
    sets = {
        "full_attention": {"rope_theta": 160000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    kinds = ["full_attention" if i % 3 == 0 else "sliding_attention" for i in range(6)]
    drop = ("global_rope_theta", "local_rope_theta")
    target = with_config(tmp_path, MODERN, drop, rope_parameters=sets, layer_types=kinds)
    prompts = [each["prompt"] for each in golden(MODERN)]
    with opened(GOLDENS / MODERN) as one, opened(target) as two:
        assert encode(one, prompts)[0][3].tobytes() == encode(two, prompts)[0][3].tobytes()


@pytest.mark.parametrize(
    ("folder", "changes", "error", "names"),
    [
        (BERT, {"hidden_act": "relu"}, UnsupportedError, "hidden_act"),
        (BERT, {"position_embedding_type": "relative_key"}, UnsupportedError, "position_embedding_type"),
        (BERT, {"is_decoder": True}, UnsupportedError, "is_decoder"),
        (BERT, {"num_attention_heads": 5}, RejectedError, "num_attention_heads"),
        (BERT, {"num_attention_heads": 0}, RejectedError, "number of heads"),
        (BERT, {"num_attention_heads": 48}, RejectedError, "head width"),
        (BERT, {"hidden_size": 10**9}, RejectedError, "model width"),
        (BERT, {"num_hidden_layers": 10**6}, RejectedError, "number of layers"),
        (BERT, {"num_hidden_layers": 3}, RejectedError, "encoder.layer.2"),
        (BERT, {"num_hidden_layers": 1}, RejectedError, "encoder.layer.1"),
        (BERT, {"max_position_embeddings": 255}, RejectedError, "position_embeddings"),
        (BERT, {"type_vocab_size": 3}, RejectedError, "token_type_embeddings"),
        (BERT, {"vocab_size": -1}, RejectedError, "vocab_size"),
        (BERT, {"layer_norm_eps": 0}, RejectedError, "epsilon"),
        (BERT, {"rope_scaling": {"factor": 2}}, UnsupportedError, "rope_scaling"),
        (XLM_R, {"pad_token_id": 2**62}, RejectedError, "number of positions"),
        (XLM_R, {"max_position_embeddings": 1}, RejectedError, "number of positions"),
        (MODERN, {"norm_bias": True}, UnsupportedError, "norm_bias"),
        (MODERN, {"global_attn_every_n_layers": 0}, RejectedError, "global_attn_every_n_layers"),
        (MODERN, {"global_rope_theta": 0}, RejectedError, "base of the rotary embedding"),
        (MODERN, {"layer_types": ["full_attention"]}, UnsupportedError, "layer_types"),
        (MODERN, {"classifier_pooling": "max"}, UnsupportedError, "classifier_pooling"),
        (MODERN, {"hidden_activation": "silu"}, UnsupportedError, "hidden_activation"),
    ],
)
def test_a_hostile_configuration_is_refused_by_name(
    tmp_path: Path, folder: str, changes: dict[str, Any], error: type[LlaisysError], names: str
) -> None:
    with pytest.raises(error, match=names):
        inspect_model(with_config(tmp_path, folder, **changes))


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    target = with_config(tmp_path, XLM_R)
    weights = read_weights(GOLDENS / XLM_R / "model.safetensors")
    weights["classifier.out_proj.weight"] = np.zeros((3, 48), np.float32)
    write_safetensors(target / "model.safetensors", weights)
    with pytest.raises(UnsupportedError, match="number of labels"):
        inspect_model(target)


def test_wrong_calls_are_rejected() -> None:
    tokens, none = np.array([1, 2, 3], np.int32), np.zeros(0, np.int32)
    for given, names in [
        ((tokens, none, [2]), "tokens has 3"),
        ((tokens, none, [3, 0]), "length of a text"),
        ((tokens, none, [4, -1]), "length of a text"),
        ((tokens, none[:0], []), "tokens has 3"),
        ((np.array([600], np.int32), none, [1]), "a token is 600"),
        ((np.array([-1], np.int32), none, [1]), "a token is -1"),
        ((tokens, np.array([0, 1, 2], np.int32), [3]), "a token type is 2"),
        ((tokens, np.array([0], np.int32), [3]), "types has 1"),
        ((none, none, []), "number of tokens"),
        ((np.ones(300, np.int32), none, [300]), "length of a text"),
        ((np.ones(1025, np.int32), none, [205] * 5), "number of tokens"),
    ]:
        with opened(GOLDENS / BERT) as encoder, pytest.raises(RejectedError, match=names):
            encoder.encode(given[0], given[1], np.array(given[2], np.int64))
    with pytest.raises(UnsupportedError, match="int8"):
        Encoder(str(GOLDENS / BERT), dtype="int8", n_batch=8, max_model_len=8, n_threads=1)
    with pytest.raises(UnsupportedError, match=r"as an encoder the model .*qwen3_embed"):
        Encoder(str(GOLDENS / QWEN_EMBED), n_batch=8, max_model_len=8, n_threads=1)


def test_each_model_refuses_what_it_cannot_do_by_name() -> None:
    with LLM(str(GOLDENS / BERT)) as llm:
        with pytest.raises(UnsupportedError, match="encoder, which generates no text"):
            llm.generate("a")
        assert len(llm.score("a", ["b", "c"], use_tqdm=False)) == 2
        (cut,) = llm.embed("a b c d", use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=4))
        whole = llm.get_tokenizer().encode("a b c d")
        assert cut.prompt_token_ids == [whole[0], *whole[-3:]]
    with LLM(str(GOLDENS / XLM_R)) as llm:
        with pytest.raises(UnsupportedError, match="no embeddings"):
            llm.embed("a")
        with pytest.raises(UnsupportedError, match="generates no text"):
            llm.generate("a")
        with pytest.raises(RejectedError, match="texts, not token ids"):
            llm.score([1], [2])
    for settings in ({"quantization": "int8"}, {"tensor_parallel_size": 2}, {"device": "cuda"}):
        with pytest.raises(UnsupportedError, match=next(iter(settings)) + "|encoder"):
            LLM(str(GOLDENS / BERT), **settings)  # type: ignore[arg-type]
