"""ModelTokenizer: texts, ids and templates, under Hugging Face's names."""

from __future__ import annotations

import pytest

from fakes import core, text
from llaisys import ModelTokenizer, RejectedError, UnsupportedError
from llaisys.model_assets import ModelAssets

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tokenizer(fake_model: ModelAssets) -> ModelTokenizer:
    return ModelTokenizer(fake_model)


def test_texts_and_ids(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("hi")
    assert ids == text.tokenizer().encode("hi", True)
    assert tokenizer.encode("hi", add_special_tokens=False) == text.tokenizer().encode("hi", False)
    assert tokenizer.decode(ids) == tokenizer.decode(tuple(ids)) == "hi"
    assert tokenizer.decode([*ids, text.EOS]) == "hi<eos>"
    assert tokenizer.decode([*ids, text.EOS], skip_special_tokens=True) == "hi"
    assert tokenizer.decode(ids[0]) == "h"


def test_the_vocabulary(tokenizer: ModelTokenizer) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == core.VOCAB_SIZE
    assert tokenizer.get_vocab()["<eot>"] == text.EOT
    assert tokenizer.convert_tokens_to_ids("<eot>") == text.EOT
    assert tokenizer.convert_tokens_to_ids(["<eot>", "no such token"]) == [text.EOT, None]
    assert tokenizer.convert_ids_to_tokens(text.EOT) == "<eot>"
    assert tokenizer.convert_ids_to_tokens([text.EOT, 10**6]) == ["<eot>", ""]


def test_special_tokens(fake_model: ModelAssets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without names for them, the ids are those of the checkpoint."""
    tokenizer = ModelTokenizer(fake_model)
    assert tokenizer.all_special_ids == [text.EOS, text.EOT, text.START]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (None, fake_model.info.eos_token_ids[0])
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (fake_model.info.bos_token_id, None)
    named = {"eos_token": "<eot>", "bos_token": "<start>", "pad_token": "<eos>", "unk_token": "<eos>"}
    monkeypatch.setattr("llaisys.model_tokenizer.special_tokens", lambda _: named)
    tokenizer = ModelTokenizer(fake_model)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eot>", text.EOT)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<start>", text.START)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<eos>", text.EOS)
    assert (tokenizer.unk_token, tokenizer.unk_token_id) == ("<eos>", text.EOS)
    assert tokenizer.convert_tokens_to_ids("no such token") == text.EOS


def test_chat_templates(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.apply_chat_template(HELLO, tokenize=False) == "user:hi;"
    shown = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    assert shown == "user:hi;>"
    assert tokenizer.apply_chat_template(HELLO) == tokenizer.encode("user:hi;", False)
    own = "{{ tools[0].name }} {{ messages[0].content }} {{ mood }}"
    tools = [{"name": "now"}]
    assert (
        tokenizer.apply_chat_template(HELLO, tools, chat_template=own, mood="!", tokenize=False) == "now hi !"
    )
    assert tokenizer.chat_template == text.TEMPLATE
    with pytest.raises(RejectedError, match="chat_template"):
        tokenizer.apply_chat_template(HELLO, chat_template="a path")


@pytest.mark.usefixtures("fake_model")
def test_a_model_without_a_template() -> None:
    tokenizer = ModelTokenizer(text.model(template=None))
    assert tokenizer.chat_template is None
    with pytest.raises(UnsupportedError, match="no chat template"):
        tokenizer.apply_chat_template(HELLO)
    shown = tokenizer.apply_chat_template(HELLO, chat_template="{{ messages[0].content }}", tokenize=False)
    assert shown == "hi"
