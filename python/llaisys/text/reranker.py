"""YesNoReranker: the prompt and the tokens with which a decoder such as Qwen3-Reranker scores a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import ModelInfo
from llaisys.text.model_files import read_object
from llaisys.text.tokenizer import Tokenizer

# Qwen3-Reranker's prompt, which its model card states.
_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The tokens of a document that is not relevant, and of one that is.
_ANSWERS = ("no", "yes")
# vLLM's key of config.json for other tokens.
_KEY = "classifier_from_token"


@dataclass(frozen=True, slots=True)
class YesNoReranker:
    """Scores a document by the probability of "yes" compared with "no" as the next token.

    - `prefix_ids`, `suffix_ids`: what is before and after the query and the document. Never truncated.
    - `token_ids`: the ids of "no" and "yes".
    """

    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    token_ids: tuple[int, int]

    def body(self, query: str, document: str, instruction: str | None) -> str:
        """Return the text between prefix and suffix. Without `instruction` it is that of a web search."""
        return f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"

    def prompt(self, body_ids: Sequence[int], n_tokens_max: int | None) -> list[int]:
        """Return the prompt of a tokenized body, whose end is cut off to make `n_tokens_max` tokens.

        Raises RejectedError if prefix and suffix leave no token for the body.
        """
        ids = list(body_ids)
        if n_tokens_max is not None:
            n_fixed = len(self.prefix_ids) + len(self.suffix_ids)
            if n_tokens_max <= n_fixed:
                raise RejectedError(
                    f"truncate_prompt_tokens is {n_tokens_max}, but the reranker's own prompt has {n_fixed} "
                    "tokens: allow more",
                    param="truncate_prompt_tokens",
                )
            ids = ids[: n_tokens_max - n_fixed]
        return [*self.prefix_ids, *ids, *self.suffix_ids]


def load_reranker(info: ModelInfo, tokenizer: Tokenizer, score_type: str, name: str) -> YesNoReranker | None:
    """Return the reranker of a decoder; None for a model whose scores are cosine similarities.

    With the `score_type` auto, a model is a reranker if `config.json` has vLLM's `classifier_from_token`, or
    if its name says Qwen3-Reranker. Raises RejectedError (not two tokens), UnsupportedError (tokens that are
    not in the vocabulary).
    """
    if score_type == "cosine" and info.has_score_head:
        raise UnsupportedError(
            "score_type cosine needs embeddings, but the model has a score head; set score_type to auto",
            param="score_type",
        )
    if not info.generates:
        if score_type == "yes_no":
            raise UnsupportedError(
                "score_type yes_no needs a model that generates text; set score_type to auto",
                param="score_type",
            )
        return None
    folder = Path(info.path)
    stated = read_object(folder / "config.json").get(_KEY) if folder.is_dir() else None
    is_named = "qwen3-reranker" in f"{name} {folder.name}".lower()
    if score_type == "cosine" or (score_type == "auto" and stated is None and not is_named):
        return None
    answers = _ANSWERS if stated is None else stated
    if not (
        isinstance(answers, list | tuple) and len(answers) == 2 and all(isinstance(a, str) for a in answers)
    ):
        raise RejectedError(
            f"config.json: {_KEY} is {str(answers)[:80]}, expected the tokens of no and yes", param="model"
        )
    no, yes = (tokenizer.token_id(answer) for answer in answers)
    if no is None or yes is None:
        raise UnsupportedError(
            f"the vocabulary has no tokens {answers[0]!r} and {answers[1]!r}, which score_type yes_no needs; "
            "set score_type to cosine",
            param="score_type",
        )
    prefix, suffix = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (_PREFIX, _SUFFIX))
    return YesNoReranker(prefix, suffix, (no, yes))
