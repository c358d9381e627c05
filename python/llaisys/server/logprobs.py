"""Log probabilities in the shapes of both endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llaisys.types import Logprob

# JSON has no infinity; vLLM's stand-in for the logprob of what cannot happen.
LOGPROB_MIN = -9999.0


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob]],
    n_top: int,
    *,
    ids_as_tokens: bool = False,
) -> dict[str, Any]:
    """`{"content": [...]}`: one entry a token, each with its `n_top` best."""

    def entry(token_id: int, candidate: Logprob) -> dict[str, Any]:
        # `bytes` is null where the token is a part of a character: its text is then U+FFFD, not its bytes.
        token = _name(token_id, candidate, ids_as_tokens=ids_as_tokens)
        raw = None if "\ufffd" in token else list(token.encode())
        return {"token": token, "logprob": _finite(candidate.logprob), "bytes": raw}

    return {
        "content": [
            {
                **entry(token_id, candidates[token_id]),
                "top_logprobs": [entry(*best) for best in _best(candidates, n_top)],
            }
            for token_id, candidates in zip(token_ids, logprobs, strict=True)
        ]
    }


def prompt_logprobs(logprobs: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: token id -> `{"logprob", "rank", "decoded_token"}` for each prompt token, null for the
    first."""
    return [
        None
        if candidates is None
        else {
            str(token_id): {
                "logprob": _finite(candidate.logprob),
                "rank": candidate.rank,
                "decoded_token": candidate.decoded_token,
            }
            for token_id, candidate in candidates.items()
        }
        for candidates in logprobs
    ]


class CompletionLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}` of one choice, delta by delta.

    `text_offset` counts characters of the tokens, an echoed prompt's included, from 0; it is why there is
    state.
    """

    def __init__(self, n_top: int, *, ids_as_tokens: bool = False) -> None:
        self._n_top = n_top
        self._ids_as_tokens = ids_as_tokens
        self._offset = 0

    def delta(
        self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None], first: str = ""
    ) -> dict[str, Any]:
        """The object of one delta; whole answers concatenate the lists. The first token of a prompt has no
        logprobs; `first` is its text."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, candidates in zip(token_ids, logprobs, strict=True):
            if candidates is None:
                text = first
                token = _name(token_id, Logprob(0.0, None, first), ids_as_tokens=self._ids_as_tokens)
                logprob = top = None
            else:
                chosen = candidates[token_id]
                text = chosen.decoded_token or ""
                token = _name(token_id, chosen, ids_as_tokens=self._ids_as_tokens)
                logprob = _finite(chosen.logprob)
                best = [*_best(candidates, self._n_top), (token_id, chosen)]
                top = {
                    _name(*each, ids_as_tokens=self._ids_as_tokens): _finite(each[1].logprob) for each in best
                }
            out["tokens"].append(token)
            out["token_logprobs"].append(logprob)
            out["top_logprobs"].append(top)
            out["text_offset"].append(self._offset)
            self._offset += len(text)
        return out


def _best(candidates: Mapping[int, Logprob], n_top: int) -> list[tuple[int, Logprob]]:
    """The `n_top` best, best first. The sampled token is a candidate too, and may not be among them."""
    return sorted(candidates.items(), key=lambda item: -item[1].logprob)[:n_top]


def _name(token_id: int, candidate: Logprob, *, ids_as_tokens: bool) -> str:
    """How an entry names its token: its text, or vLLM's form of its id."""
    return f"token_id:{token_id}" if ids_as_tokens else candidate.decoded_token or ""


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
