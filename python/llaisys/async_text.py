"""AsyncText: renders, tokenizes and decodes the texts of one model, off the event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from llaisys.config import Config
from llaisys.model_assets import ModelAssets
from llaisys.prompt import truncate_prompt
from llaisys.sampling_params import SamplingParams
from llaisys.text.tokenizer import PairPrompt
from llaisys.text.tokenizer_pool import AsyncTokenizer


class AsyncText(ABC):
    """The methods of AsyncLLM that convert between text and token ids.

    They run in the tokenizer workers, within limits. Without workers they run in threads of this process.
    """

    def __init__(self, config: Config, model: ModelAssets) -> None:
        self._config = config
        self._model = model
        self._async_tokenizer: AsyncTokenizer | None = None  # None: tokenize in threads of this process

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """The longest request in tokens, prompt and completion together."""

    @property
    def template_text(self) -> str:
        """The source of the model's chat template; empty if it has none."""
        return "" if self._model.template is None else self._model.template.text

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        n_tokens_max: int | None = None,
    ) -> list[int]:
        """Render a conversation with the model's chat template and return its token ids, off the event loop.

        Templates write their own special tokens; `add_special_tokens` adds the tokenizer's. Raises
        UnsupportedError if the model has no template, RejectedError for invalid messages, ContextLengthError
        as `encode` does.
        """
        options = {
            **(template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        if self._async_tokenizer is not None:
            self._model.chat_template()
            return await self._async_tokenizer.chat(messages, options, add_special_tokens, n_tokens_max)
        text, ids = await asyncio.to_thread(self._model.chat_prompt, messages, options)
        return await self.encode(text) if add_special_tokens else ids

    async def prompt_ids(
        self, prompt: str | Sequence[int], params: SamplingParams, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids that `generate` uses for a prompt, after `truncate_prompt_tokens`."""
        n_kept = params.truncate_prompt_tokens
        is_cut = self._model.info.is_encoder and n_kept is not None and add_special_tokens
        if isinstance(prompt, str) and is_cut and n_kept is not None:
            # An encoder's special tokens are at both ends, and stay.
            ids = await self.encode(prompt, add_special_tokens=False)
            n_kept = self.max_model_len if n_kept == -1 else n_kept
            return self._model.tokenizer.truncate(ids, n_kept, params.truncation_side)
        if isinstance(prompt, str):
            n_tokens_max = self.max_prompt_tokens(params)
            ids = await self.encode(prompt, add_special_tokens=add_special_tokens, n_tokens_max=n_tokens_max)
        else:
            ids = list(prompt)
        return truncate_prompt(ids, params, self.max_model_len)

    @property
    def scores_pairs(self) -> bool:
        """True if the model reads a query and a document together to score them."""
        return self._model.scores_pairs

    async def pair_prompt(
        self,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> PairPrompt:
        """Return the prompt that scores a document for a query, cut to `truncate_prompt_tokens` tokens.

        -1 is as many as the context has. Raises as `encode` and `ModelAssets.pair_prompt`.
        """
        n_max = self.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        if self._async_tokenizer is None:
            return await asyncio.to_thread(self._model.pair_prompt, query, document, instruction, n_max)
        reranker = self._model.pair_reranker(instruction)
        if reranker is None:
            return await self._async_tokenizer.encode_pair(query, document, n_max)
        most = self._config.max_input_tokens or self.max_model_len if n_max is None else None
        body = await self.encode(
            reranker.body(query, document, instruction), add_special_tokens=False, n_tokens_max=most
        )
        return PairPrompt(reranker.prompt(body, n_max))

    def max_prompt_tokens(self, params: SamplingParams) -> int | None:
        """Return the maximum prompt length in tokens of `generate`; None if it truncates the prompt."""
        if params.truncate_prompt_tokens is not None:
            return None
        return self._config.max_input_tokens or self.max_model_len

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, n_tokens_max: int | None = None
    ) -> list[int]:
        """Return the token ids of a text, tokenized off the event loop. Raises as `Tokenizer.encode`."""
        if self._async_tokenizer is not None:
            return await self._async_tokenizer.encode(text, add_special_tokens, n_tokens_max)
        return await asyncio.to_thread(self._model.tokenizer.encode, text, add_special_tokens, n_tokens_max)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, off the event loop."""
        if self._async_tokenizer is not None:
            return await self._async_tokenizer.decode(ids, skip_special_tokens)
        return await asyncio.to_thread(self._model.tokenizer.decode, list(ids), skip_special_tokens)

    async def token_strs(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary entry of each token id, off the event loop."""
        return await asyncio.to_thread(lambda: [self._model.tokenizer.vocab_text(id) for id in ids])
