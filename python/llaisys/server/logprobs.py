"""Log probabilities in the shapes of both endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llaisys.types import Logprob

# JSON has no infinity; vLLM's stand-in for the logprob of what cannot happen.
LOGPROB_MIN = -9999.0


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]], n_top: int
) -> dict[str, Any]:
    """`{"content": [...]}`: one entry a token, each with its `n_top` best."""
    content = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        entry = _chat_entry(candidates[token_id])
        entry["top_logprobs"] = [_chat_entry(candidate) for candidate in _best(candidates, n_top)]
        content.append(entry)
    return {"content": content}


def _chat_entry(candidate: Logprob) -> dict[str, Any]:
    """`bytes` is null where the token is a part of a character: its text is then U+FFFD, not its bytes."""
    token = candidate.decoded_token or ""
    raw = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": _finite(candidate.logprob), "bytes": raw}


class CompletionLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}` of one choice, delta by delta.

    `text_offset` counts characters of the answer's tokens, from 0; it is why there is state.
    """

    def __init__(self, n_top: int) -> None:
        self._n_top = n_top
        self._offset = 0

    def delta(self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
        """The object of one delta; whole answers concatenate the lists."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, candidates in zip(token_ids, logprobs, strict=True):
            chosen = candidates[token_id]
            token = chosen.decoded_token or ""
            best = _best(candidates, self._n_top)
            out["tokens"].append(token)
            out["token_logprobs"].append(_finite(chosen.logprob))
            out["top_logprobs"].append({c.decoded_token or "": _finite(c.logprob) for c in (*best, chosen)})
            out["text_offset"].append(self._offset)
            self._offset += len(token)
        return out


def _best(candidates: Mapping[int, Logprob], n_top: int) -> list[Logprob]:
    """The `n_top` best, best first. The sampled token is a candidate too, and may not be among them."""
    return sorted(candidates.values(), key=lambda c: -c.logprob)[:n_top]


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
