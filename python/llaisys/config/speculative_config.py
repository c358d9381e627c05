"""SpeculativeConfig: the settings of speculative decoding, in vLLM's JSON form."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

# The most drafts of one request in a step. Beyond 16 rows a step takes about as long as separate steps.
DRAFTS_MAX = 16


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SpeculativeConfig:
    """Speculative decoding with one method. The names and meanings are vLLM's.

    - `method`: `ngram` proposes what followed the newest tokens earlier in the request; `suffix` also uses
      earlier outputs of the same client; `draft_model` runs a second, smaller model with the same vocabulary;
      `none` is off; `auto` is `suffix` on the CPU and `none` on a GPU. `num_speculative_tokens`: drafts of a
      request per step.
    - `draft_model`: `model` is the second model, in the forms of the setting `model`.
    - `ngram`: `prompt_lookup_min` and `prompt_lookup_max` are the lengths of a match.
    - `suffix`: a match is compared over `suffix_decoding_max_tree_depth` tokens;
      `suffix_decoding_max_cached_requests` earlier outputs are kept. There are up to
      `suffix_decoding_max_spec_factor` drafts per token of the match, each with an estimated probability of
      at least `suffix_decoding_min_token_prob`.
    """

    method: Literal["auto", "none", "ngram", "suffix", "draft_model"]
    num_speculative_tokens: Annotated[int, Field(ge=1, le=DRAFTS_MAX)] = 8
    model: str | None = None
    prompt_lookup_min: Annotated[int, Field(ge=1, le=64)] = 3
    prompt_lookup_max: Annotated[int, Field(ge=1, le=64)] = 8
    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=4, le=256)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0, le=64)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1

    @model_validator(mode="after")
    def _check(self) -> SpeculativeConfig:
        if (self.model is None) == (self.method == "draft_model"):
            raise ValueError("model names the second model of the method draft_model, and of no other method")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, more than prompt_lookup_max "
                f"{self.prompt_lookup_max}"
            )
        return self
