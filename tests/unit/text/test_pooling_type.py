"""The pooling type of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llaisys.errors import RejectedError
from llaisys.model_info import ModelInfo
from llaisys.text.pooling_type import model_normalizes, model_pooling

Info = Callable[..., ModelInfo]
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def folder(path: Path, pooling: dict[str, Any], *modules: dict[str, Any]) -> None:
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling), "utf-8")
    (path / "modules.json").write_text(json.dumps([TRANSFORMER, POOLING, *modules]), "utf-8")


@pytest.mark.parametrize(
    ("stated", "want"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "max"}, "max"),
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max and mean"),
        ({"word_embedding_dimension": 1}, "last"),
    ],
)
def test_pooling_type_of_a_sentence_transformers_folder(
    tmp_path: Path, info: Info, stated: dict[str, Any], want: str
) -> None:
    folder(tmp_path, stated)
    assert model_pooling(info(tmp_path)) == want


def test_a_pooling_of_another_width_is_rejected(tmp_path: Path, info: Info) -> None:
    for key in ("word_embedding_dimension", "embedding_dimension"):
        (tmp_path / key).mkdir()
        folder(tmp_path / key, {key: 8})
        with pytest.raises(RejectedError, match=f"{key} is 8, but the model has 1"):
            model_pooling(info(tmp_path / key))


def test_vectors_are_normalized_unless_the_modules_leave_it_out(tmp_path: Path, info: Info) -> None:
    assert model_normalizes(info(tmp_path))
    folder(tmp_path, {"pooling_mode_mean_tokens": True})
    assert not model_normalizes(info(tmp_path))
    (tmp_path / "modules.json").write_text(json.dumps([TRANSFORMER, POOLING, NORMALIZE]), "utf-8")
    assert model_normalizes(info(tmp_path))
    assert model_normalizes(replace(info(tmp_path / "x.gguf"), pooling_type=1))


def test_an_unsupported_module_is_rejected_by_name(tmp_path: Path, info: Info) -> None:
    folder(tmp_path, {"pooling_mode_mean_tokens": True}, DENSE)
    assert model_pooling(info(tmp_path)) == "Dense"


def test_a_folder_without_a_pooling_type(tmp_path: Path, info: Info) -> None:
    assert model_pooling(info(tmp_path)) == "last"


@pytest.mark.parametrize(
    ("number", "want"),
    [(0, "none"), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank"), (9, "pooling_type 9")],
)
def test_pooling_type_of_a_gguf_file(tmp_path: Path, info: Info, number: int, want: str) -> None:
    assert model_pooling(replace(info(tmp_path / "x.gguf"), pooling_type=number)) == want


@pytest.mark.parametrize("text", ["{", "7", '[{"idx": 0}]', "[7]"])
def test_a_damaged_modules_json_is_rejected(tmp_path: Path, info: Info, text: str) -> None:
    (tmp_path / "modules.json").write_text(text, "utf-8")
    with pytest.raises(RejectedError, match="modules"):
        model_pooling(info(tmp_path))
