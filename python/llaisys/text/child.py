"""Jobs of a tokenizer worker: renders templates, tokenizes, detokenizes and reads bodies for a server (see
`job_process.py`)."""

from __future__ import annotations

import json
from array import array
from typing import Any, TypeAlias

from llaisys.body import read_body
from llaisys.errors import RejectedError
from llaisys.job_process import Jobs
from llaisys.text.template import ChatTemplate, TemplateSource
from llaisys.text.tokenizer import Tokenizer, tokenizer_of_json

# A model's tokenizer and chat template.
Kit: TypeAlias = tuple[Tokenizer, ChatTemplate | None]

_KITS: dict[int, Kit] = {}


def _load(kit: int, tokenizer: str, texts: dict[str, str] | None, special: dict[str, str]) -> None:
    template = None if texts is None else ChatTemplate(TemplateSource(texts, special))
    _KITS[kit] = (tokenizer_of_json(tokenizer), template)
    _KITS[kit][0].encode("Hello, world", add_special_tokens=True)  # builds what is built at the first use


def _encode(kit: int, text: str, add_special_tokens: bool, n_most: int | None) -> bytes:
    return _packed(_KITS[kit][0].encode(text, add_special_tokens, n_most))


def _chat(
    kit: int, messages: list[Any], options: dict[str, Any], add_special_tokens: bool, n_most: int | None
) -> bytes:
    tokenizer, template = _KITS[kit]
    assert template is not None
    return _packed(tokenizer.encode(template.render(messages, **options), add_special_tokens, n_most))


def _decode(kit: int, packed: bytes, skip_special_tokens: bool) -> str:
    return _KITS[kit][0].decode(array("I", packed).tolist(), skip_special_tokens)


def _json(raw: bytes, model: str | None) -> tuple[Any, ...]:
    """`("value", value, flaw)`, or why it is no JSON text: `("position", n)` or `("no text",)`."""
    try:
        return ("value", *read_body(raw, model))
    except json.JSONDecodeError as e:
        return ("position", e.pos)
    except RejectedError:
        raise
    except (ValueError, RecursionError):  # no UTF-8, an integer of thousands of digits, nesting
        return ("no text",)


def _packed(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


JOBS: Jobs = {"kit": _load, "encode": _encode, "decode": _decode, "chat": _chat, "json": _json}
