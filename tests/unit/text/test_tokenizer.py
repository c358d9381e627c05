"""The tokenizer of a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from llaisys.engine.worker import inspect_model
from llaisys.errors import ContextLengthError, RejectedError, UnsupportedError
from llaisys.model_info import ModelInfo
from llaisys.text import tokenizer as module
from llaisys.text.tokenizer import Tokenizer, load_tokenizer

Info = Callable[..., ModelInfo]
GOLDEN = Path(__file__).parents[2] / "data" / "goldens" / "qwen2-tied-bf16"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a small tokenizer that a test may damage."""
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "tokenizer.json").read_bytes())
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokenizer.json"
    stated = json.loads(path.read_text("utf-8"))
    change(stated)
    path.write_text(json.dumps(stated), "utf-8")


@pytest.fixture(scope="module")
def reference(qwen_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(qwen_folder / "tokenizer.json"))


@given(ids=st.lists(st.integers(0, 151_645), max_size=50), skip=st.booleans())
def test_decode_equals_that_of_the_tokenizers_library(
    qwen: Tokenizer, reference: tokenizers.Tokenizer, ids: list[int], skip: bool
) -> None:
    assert qwen.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@given(text=st.text())
def test_encode_equals_that_of_the_tokenizers_library(
    qwen: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    assert qwen.encode(text, add_special_tokens=True) == reference.encode(text).ids


@given(text=st.text() | st.text(alphabet="a \u0958\ufb2c").map(lambda text: text * 20))
def test_the_length_check_rejects_no_valid_text(qwen: Tokenizer, text: str) -> None:
    ids = qwen.encode(text, add_special_tokens=False)
    assert qwen.encode(text, add_special_tokens=False, n_tokens_max=len(ids)) == ids


def test_a_much_too_long_text_is_rejected_before_tokenization(qwen: Tokenizer) -> None:
    longest = max(len(qwen.vocab_text(id).encode()) for id in range(qwen.vocab_size))
    n_bytes = 3 * longest * 10
    assert len(qwen.encode("a" * n_bytes, add_special_tokens=False, n_tokens_max=10)) > 10
    with pytest.raises(ContextLengthError, match=f"{n_bytes + 1} bytes.* more than the 10 tokens"):
        qwen.encode("a" * (n_bytes + 1), add_special_tokens=False, n_tokens_max=10)


def test_the_length_check_is_off_where_encoding_may_drop_text(folder: Path, info: Info) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    raw["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (folder / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    tokenizer = load_tokenizer(info(folder))
    assert len(tokenizer.encode(" " * 100_000 + "x", add_special_tokens=False, n_tokens_max=1)) == 1


def test_text_and_bytes_of_ids(qwen: Tokenizer) -> None:
    crab = qwen.encode(" \U0001f980", add_special_tokens=False)
    assert len(crab) > 1
    assert b"".join(qwen.id_to_bytes(id) for id in crab) == " \U0001f980".encode()
    assert "\ufffd" in qwen.token_text(crab[-1])
    (end,) = qwen.encode("<|im_end|>", add_special_tokens=False)
    assert end == 151645
    assert qwen.token_text(end) == "<|im_end|>"
    assert qwen.is_special(end)
    assert not qwen.is_special(crab[0])
    assert qwen.vocab_size == 151646


@pytest.mark.parametrize("id", [151646, 10**9, -1])
def test_an_id_without_a_token_has_no_text(qwen: Tokenizer, id: int) -> None:
    assert qwen.id_to_bytes(id) == b""
    assert qwen.decode([id], skip_special_tokens=False) == ""


def test_special_tokens_in_user_text_become_their_ids_as_in_transformers(qwen: Tokenizer) -> None:
    """A user can therefore forge a role. Whether to encode such text as plain text is undecided."""
    assert qwen.encode("<|im_start|>", add_special_tokens=False) == [151644]


def test_truncation_of_the_file_is_ignored(folder: Path, info: Info) -> None:
    whole = load_tokenizer(info(folder)).encode("a long enough text", add_special_tokens=False)
    rule = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    edit(folder, lambda stated: stated.update(truncation=rule))
    assert load_tokenizer(info(folder)).encode("a long enough text", add_special_tokens=False) == whole


def test_text_that_is_not_unicode_is_rejected(qwen: Tokenizer) -> None:
    with pytest.raises(RejectedError, match="character 2"):
        qwen.encode("ab\ud800", add_special_tokens=False)


def test_a_backtracking_regular_expression_is_a_rejection(folder: Path, info: Info) -> None:
    def explode(stated: dict[str, Any]) -> None:
        stated["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$"

    edit(folder, explode)
    with pytest.raises(RejectedError, match="retry-limit"):
        load_tokenizer(info(folder)).encode("a" * 40 + "b", add_special_tokens=False)


def test_a_folder_without_a_tokenizer_is_rejected(tmp_path: Path, info: Info) -> None:
    with pytest.raises(RejectedError, match=r"no tokenizer\.json"):
        load_tokenizer(info(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "1.0"}', "[" * 100_000])
def test_a_damaged_file_is_rejected(tmp_path: Path, info: Info, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text, "utf-8")
    with pytest.raises(RejectedError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(info(tmp_path))


def test_a_file_above_the_limit_is_not_read(
    folder: Path, info: Info, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes = (folder / "tokenizer.json").stat().st_size
    monkeypatch.setattr(module, "FILE_BYTES_MAX", n_bytes)
    load_tokenizer(info(folder))
    monkeypatch.setattr(module, "FILE_BYTES_MAX", n_bytes - 1)
    with pytest.raises(RejectedError, match=str(n_bytes)):
        load_tokenizer(info(folder))


def test_an_id_above_the_limit_is_rejected(folder: Path, info: Info, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VOCAB_MAX", 599)
    with pytest.raises(RejectedError, match="ids end at 599"):
        load_tokenizer(info(folder))


def test_an_unsupported_tokenizer_is_rejected_by_name(folder: Path, info: Info) -> None:
    edit(folder, lambda stated: stated.update(decoder={"type": "ByteFallback"}))
    with pytest.raises(UnsupportedError, match="ByteFallback"):
        load_tokenizer(info(folder))
    edit(folder, lambda stated: stated.update(decoder=None))
    with pytest.raises(UnsupportedError, match="none"):
        load_tokenizer(info(folder))


def test_add_bos_token_of_tokenizer_config_json(folder: Path, info: Info) -> None:
    config = {"add_bos_token": True, "bos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = load_tokenizer(info(folder))
    assert tokenizer.encode("x", add_special_tokens=True)[0] == 597
    assert tokenizer.encode("x", add_special_tokens=False)[0] != 597
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>"}), "utf-8")
    with pytest.raises(RejectedError, match="<s>"):
        load_tokenizer(info(folder))


def test_added_tokens_of_tokenizer_config_json(folder: Path, info: Info) -> None:
    def state(id: int) -> None:
        listed = {str(id): {"content": "<|eot|>", "special": True}}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}), "utf-8")

    state(600)
    tokenizer = load_tokenizer(info(folder))
    assert tokenizer.encode("<|eot|>", add_special_tokens=False) == [600]
    assert tokenizer.is_special(600)
    state(700)
    with pytest.raises(RejectedError, match="600"):
        load_tokenizer(info(folder))


@pytest.mark.parametrize(
    "listed",
    [
        {"x": {"content": "a"}},
        {"-1": {"content": "a"}},
        {"9" * 5000: {"content": "a"}},
        {"600": {}},
        {"600": {"content": ["a"]}},
        {"600": {"content": ""}},
        {"600": "a"},
        {"600": None},
    ],
)
def test_invalid_added_tokens_are_rejected_by_name(folder: Path, info: Info, listed: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}), "utf-8")
    with pytest.raises(RejectedError, match="expected ids with content"):
        load_tokenizer(info(folder))


def test_a_backtracking_pattern_is_rejected_before_the_library_uses_it(folder: Path) -> None:
    for path in GOLDEN.iterdir():
        if path.suffix in (".json", ".safetensors") and path.name != "tokenizer.json":
            (folder / path.name).write_bytes(path.read_bytes())
    inspect_model(folder)

    def explode(stated: dict[str, Any]) -> None:
        stated["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$"

    edit(folder, explode)
    with pytest.raises(RejectedError, match=r"tokenizer\.json has the pattern"):
        inspect_model(folder)


def test_an_error_shows_a_bounded_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["x" * 500_000]}), "utf-8")
    with pytest.raises(UnsupportedError, match=r"architecture .x{900}.*\.\.\.$") as caught:
        inspect_model(tmp_path)
    assert len(str(caught.value)) < 1100


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"x": ' + "9" * 5000 + "}", "[" * 100_000, '"\ud800"'.encode("utf-8", "surrogatepass")],
)
def test_a_damaged_configuration_is_rejected(folder: Path, info: Info, text: str | bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RejectedError, match=r"tokenizer_config\.json"):
        load_tokenizer(info(folder))
