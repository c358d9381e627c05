"""PoolingMethods: the methods of LLM that pool prompts into vectors, with vLLM's arguments and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llaisys.errors import RejectedError, RequestFailedError
from llaisys.lora_request import LoRARequest, LorasOrOne, loras_of
from llaisys.offline_engine import OfflineEngine, ShowProgress, merge_deltas
from llaisys.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from llaisys.pooling_params import PoolingParams, check_task
from llaisys.prompt import Prompt, as_prompt_list, read_prompt
from llaisys.vllm_arguments import refuse

PoolingParamsOrList: TypeAlias = "PoolingParams | Sequence[PoolingParams]"


class PoolingMethods:
    """Embeddings of any model. How hidden states are pooled is a setting of the model (`pooling_type`)."""

    _engine: OfflineEngine

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParamsOrList | None = None,
        *,
        use_tqdm: ShowProgress = True,
        lora_request: LorasOrOne = None,
        pooling_task: str | None = None,
        tokenization_kwargs: None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the pooled hidden states of each prompt, in the order of the prompts.

        As in vLLM, `pooling_task` is required; "embed" is supported. Prompts, errors, `use_tqdm` and
        `lora_request` are those of `generate`. Raises RequestFailedError if a request fails or times out,
        UnsupportedError if the model needs a pooling that is not supported.
        """
        if pooling_task is None:
            raise RejectedError("pooling_task is required: pass 'embed', or use embed", param="pooling_task")
        check_task(pooling_task)
        refuse(tokenization_kwargs=tokenization_kwargs)
        return [
            PoolingRequestOutput(
                output.request_id,
                PoolingOutput(_vector(output)),
                output.prompt_token_ids,
                output.num_cached_tokens,
                output.finished,
            )
            for output in self._pool(as_prompt_list(prompts), pooling_params, use_tqdm, lora_request)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: ShowProgress = True,
        pooling_params: PoolingParamsOrList | None = None,
        lora_request: LorasOrOne = None,
        tokenization_kwargs: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in the order of the prompts. Raises as `encode`."""
        refuse(tokenization_kwargs=tokenization_kwargs)
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(_vector(output).tolist()),
                output.prompt_token_ids,
                output.num_cached_tokens,
                output.finished,
            )
            for output in self._pool(as_prompt_list(prompts), pooling_params, use_tqdm, lora_request)
        ]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: ShowProgress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair: a reranker's, or the cosine similarity of the embeddings.

        `data_1` has one text, which is compared with each text of `data_2`, or as many texts as `data_2`. A
        reranker reads `data_1` as queries and `data_2` as documents, and needs texts. `lora_request` is the
        adapter of all texts.
        The outputs have the order of `data_2`. Raises as `encode`, and RejectedError for other lengths.
        """
        refuse(tokenization_kwargs=tokenization_kwargs, chat_template=chat_template)
        first, second = as_prompt_list(data_1), as_prompt_list(data_2)
        if not first or not second or len(first) not in (1, len(second)):
            raise RejectedError(
                f"{len(first)} texts cannot be paired with {len(second)}: pass 1 and 1, 1 and n, or n and n",
                param="data_1",
            )
        if self._engine.model.scores_pairs:
            queries = list(first) * (len(second) // len(first))
            pairs = list(zip(queries, second, strict=True))
            return self._score_pairs(pairs, pooling_params, use_tqdm, lora_request)
        pooled = self._pool([*first, *second], pooling_params, use_tqdm, lora_request, normalize=True)
        left, right = pooled[: len(first)], pooled[len(first) :]
        return [_scored(a, b) for a, b in zip(left * (len(right) // len(left)), right, strict=True)]

    def _score_pairs(
        self,
        pairs: Sequence[tuple[Prompt, Prompt]],
        pooling_params: PoolingParams | None,
        use_tqdm: ShowProgress,
        lora_request: LoRARequest | None,
    ) -> list[ScoringRequestOutput]:
        """Return what the model's score head or reranker computes for each pair of query and document."""
        engine, params = self._engine, pooling_params or PoolingParams()
        n_max = params.truncate_prompt_tokens
        n_max = engine.max_model_len if n_max == -1 else n_max
        prompts = [
            engine.model.pair_prompt(_text(query, "data_1"), _text(document, "data_2"), None, n_max)
            for query, document in pairs
        ]
        prepared = engine.prepare(
            [(None, prompt.ids) for prompt in prompts],
            [PoolingParams().sampling_params()] * len(pairs),
            pooling="score",
            normalize=[engine.model.normalizes] * len(pairs),
            second_segments=[prompt.second_segment for prompt in prompts],
            loras=loras_of(lora_request, len(pairs)),
        )
        scored = []
        for i, output in enumerate(merge_deltas(prepared, engine.deltas(prepared, use_tqdm=use_tqdm))):
            if output.score is None:
                reason = output.outputs[0].finish_reason
                raise RequestFailedError(f"pair {i} has no score ({reason}); the log has the cause")
            scored.append(
                ScoringRequestOutput(
                    output.request_id,
                    ScoringOutput(output.score),
                    output.prompt_token_ids,
                    output.num_cached_tokens,
                    output.finished,
                )
            )
        return scored

    def _pool(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParamsOrList | None,
        use_tqdm: ShowProgress,
        lora_request: LorasOrOne,
        *,
        normalize: bool | None = None,
    ) -> list[RequestOutput]:
        """Return the outputs with the embeddings. `normalize`: overrides that of the parameters."""
        params = pooling_params if pooling_params is not None else PoolingParams()
        given = [params] * len(prompts) if isinstance(params, PoolingParams) else params
        if len(given) != len(prompts):
            raise RejectedError(
                f"{len(prompts)} prompts and {len(given)} pooling_params: pass one for all, or one each",
                param="pooling_params",
            )
        engine, loras = self._engine, loras_of(lora_request, len(prompts))
        for each in given:
            each.check_dimensions(engine.model.info.d_model)
        prepared = engine.prepare(
            [engine.encode(prompt) for prompt in prompts],
            [each.sampling_params() for each in given],
            pooling=engine.model.embedding_pooling(),
            normalize=[
                _first_stated(normalize, each.normalize, default=engine.model.normalizes) for each in given
            ],
            loras=loras,
        )
        outputs = merge_deltas(prepared, engine.deltas(prepared, use_tqdm=use_tqdm))
        for i, output in enumerate(outputs):
            if output.embedding is None:
                reason = output.outputs[0].finish_reason
                raise RequestFailedError(f"prompt {i} has no embedding ({reason}); the log has the cause")
        return outputs


def _first_stated(*flags: bool | None, default: bool) -> bool:
    return next((flag for flag in flags if flag is not None), default)


def _text(prompt: Prompt, param: str) -> str:
    """Return the text of a prompt. Raises RejectedError for token ids."""
    text, _ = read_prompt(prompt)
    if text is None:
        raise RejectedError("a reranker needs texts, not token ids", param=param)
    return text


def _vector(output: RequestOutput) -> NDArray[np.float32]:
    return np.frombuffer(output.embedding or b"", "<f4").astype(np.float32)


def _scored(left: RequestOutput, right: RequestOutput) -> ScoringRequestOutput:
    """Return the score of a pair. The product of two vectors with L2 norm 1 is their cosine similarity."""
    score = float(np.dot(_vector(left).astype(np.float64), _vector(right).astype(np.float64)))
    return ScoringRequestOutput(
        f"{left.request_id}_{right.request_id}",
        ScoringOutput(min(1.0, max(-1.0, score))),
        left.prompt_token_ids + right.prompt_token_ids,
        left.num_cached_tokens + right.num_cached_tokens,
        left.finished and right.finished,
    )
