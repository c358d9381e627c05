"""Selection of a repository's files, and parsing of ids."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import ResolvedRevision, constants

from llaisys.errors import LlaisysError, RejectedError, UnsupportedError
from llaisys.hub import PullError
from llaisys.hub.huggingface import HubId, _check_free_space, choose, parse

SMALL = ["config.json", "tokenizer.json"]
INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
QUANTS = ["x-Q4_0.gguf", "x-Q4_K_M.gguf", "x-Q4_K_S.gguf", "BF16/x.BF16.gguf", "mmproj-x-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("name", "repo", "variant"),
    [
        ("org/name", "org/name", None),
        ("Qwen/Qwen2.5-0.5B_x", "Qwen/Qwen2.5-0.5B_x", None),
        ("org/name:Q4_K_M", "org/name", "Q4_K_M"),
        ("org/name:sub/x.gguf", "org/name", "sub/x.gguf"),
        ("hf.co/org/name:Q8_0", "org/name", "Q8_0"),
        ("https://huggingface.co/org/name", "org/name", None),
    ],
)
def test_valid_repository_ids(name: str, repo: str, variant: str | None) -> None:
    assert parse(name) == HubId(repo, variant)


@pytest.mark.parametrize(
    "name",
    [
        "name",
        "",
        "/name",
        "org/",
        "../x",
        "org/..",
        "a/b/c",
        "org/name:",
        "org/name:/x",
        "org/na me",
        "o/n:a/../b\n",
    ],
)
def test_invalid_repository_ids(name: str) -> None:
    assert parse(name) is None


def test_an_id_round_trips_as_text() -> None:
    assert str(parse("hf.co/org/name:Q8_0")) == "org/name:Q8_0"
    assert str(parse("org/name")) == "org/name"


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        ([*SMALL, "model.safetensors", "pytorch_model.bin", "README.md"], [*SMALL, "model.safetensors"]),
        ([*SMALL, "model.safetensors", "consolidated.safetensors"], [*SMALL, "model.safetensors"]),
        (
            [
                *SMALL,
                INDEX,
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "x.safetensors",
            ],
            [*SMALL, INDEX, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        ([*SMALL, "model.safetensors", "x.gguf"], [*SMALL, "model.safetensors"]),
        (
            [*SMALL, "chat_template.jinja", "generation_config.json", "model.safetensors"],
            [*SMALL, "generation_config.json", "chat_template.jinja", "model.safetensors"],
        ),
        (["config.json", "only.gguf", "mmproj-only.gguf"], ["only.gguf"]),
        (QUANTS, ["x-Q4_K_M.gguf"]),
    ],
)
def test_only_needed_files_are_downloaded(files: list[str], chosen: list[str]) -> None:
    assert choose(HubId("org/name", None), files) == chosen


@pytest.mark.parametrize(
    ("variant", "chosen"),
    [
        ("Q4_0", "x-Q4_0.gguf"),
        ("q4_k_s", "x-Q4_K_S.gguf"),
        ("x-Q4_0.gguf", "x-Q4_0.gguf"),
        ("bf16", "BF16/x.BF16.gguf"),
        ("BF16/x.BF16.gguf", "BF16/x.BF16.gguf"),
        ("x.BF16.gguf", "BF16/x.BF16.gguf"),
    ],
)
def test_a_variant_selects_one_file(variant: str, chosen: str) -> None:
    assert choose(HubId("org/name", variant), QUANTS) == [chosen]


@pytest.mark.parametrize(
    ("variant", "files", "error", "words"),
    [
        (None, [*SMALL, "pytorch_model.bin"], UnsupportedError, "only as pickles"),
        (None, ["config.json", "model.safetensors"], UnsupportedError, "no tokenizer.json"),
        (None, ["README.md"], UnsupportedError, "no supported model"),
        (None, [*SMALL, INDEX, SHARDS[1]], UnsupportedError, "no supported model"),
        (None, [*SMALL, INDEX], UnsupportedError, "no supported model"),
        (
            None,
            ["x-Q4_0.gguf", "x-Q8_0.gguf"],
            RejectedError,
            "for Q4_K_M; there are: x-Q4_0.gguf, x-Q8_0.gguf",
        ),
        ("Q4_K", QUANTS, RejectedError, "no file for Q4_K; there are"),
        ("Q8_0", QUANTS, RejectedError, "no file for Q8_0"),
        ("Q4_0", ["a-Q4_0.gguf", "b-Q4_0.gguf"], RejectedError, "more than one file for Q4_0"),
        ("Q4_0", [*SMALL, "model.safetensors"], RejectedError, "no GGUF file for Q4_0"),
        ("x-00001-of-00002.gguf", ["x-00001-of-00002.gguf"], UnsupportedError, "llama-gguf-split --merge"),
    ],
)
def test_an_unsupported_repository_is_named(
    variant: str | None, files: list[str], error: type[LlaisysError], words: str
) -> None:
    with pytest.raises(error, match=words):
        choose(HubId("org/name", variant), files)


def test_insufficient_disk_space_is_reported_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    commit = ResolvedRevision("0" * 40)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, 10 << 20))
    _check_free_space(HubId("org/name", None), {"a": 5 << 20, "b": 5 << 20}, commit)
    with pytest.raises(PullError, match=r"needs 11 MiB more, .* has 10 MiB free. Set HF_HOME to another"):
        _check_free_space(HubId("org/name", None), {"a": 5 << 20, "b": 6 << 20}, commit)
