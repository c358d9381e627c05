"""ModelAssets: metadata, tokenizer, chat template and sampling defaults of a model; not its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llaisys.config import Config
from llaisys.engine.grammar import GrammarCompiler, GrammarTokenizer
from llaisys.engine.sessions.file import check_store
from llaisys.engine.worker import inspect_model
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.hub import resolve_model
from llaisys.model_info import ModelInfo, Pooling
from llaisys.sampling_params import SamplingParams
from llaisys.text.chat_template import ChatTemplate, load_chat_template, read_chat_template
from llaisys.text.pooling_type import DEFAULT as DEFAULT_POOLING
from llaisys.text.pooling_type import model_normalizes, model_pooling
from llaisys.text.reranker import YesNoReranker, load_reranker
from llaisys.text.tokenizer import PairPrompt, Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelAssets:
    """The assets of one model. Immutable and safe to use from any thread.

    - `name`: the name of the model unless `served_model_name` is set.
    - `sampling_defaults`: SamplingParams fields from `generation_config.json` or the list of embedded models.
    - `pooling`: the pooling type from the setting or the checkpoint. It may be unsupported, which
      `embedding_pooling` checks. `normalizes`: embeddings have L2 norm 1, or the scores of a score head are
      numbers from 0 to 1.
    - `reranker`: how a decoder scores a document for a query; None: by cosine similarity.
    - `draft`: the second model of speculative decoding.
    """

    name: str
    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    sampling_defaults: Mapping[str, Any]
    pooling: str = DEFAULT_POOLING
    normalizes: bool = True
    reranker: YesNoReranker | None = None
    draft: ModelInfo | None = None

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        template: ChatTemplate | None = None,
    ) -> tuple[str, list[int]]:
        """Return the text and the token ids of a conversation. `options` are those of `ChatTemplate.render`.

        `template` replaces the model's. Raises UnsupportedError (no template) or RejectedError (the
        messages).
        """
        text = (template or self.chat_template()).render(messages, **options)
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    def chat_template(self, text: str | None = None) -> ChatTemplate:
        """Return the chat template of this text, or else the model's.

        Raises RejectedError for an invalid text, UnsupportedError if the model has no template.
        """
        if text is not None:
            return read_chat_template(text, self.info)
        if self.template is None:
            raise UnsupportedError(
                f"{self.name} has no chat template; set one with --chat-template, or use plain completions",
                param="messages",
            )
        return self.template

    def embedding_pooling(self) -> Pooling:
        """Return the pooling type. Raises UnsupportedError naming an unsupported one."""
        self.check_task("mean")
        match self.pooling:
            case "mean" | "last" | "cls" | "max" as pooling:
                return pooling
        raise UnsupportedError(
            f"{self.name} pools embeddings with {self.pooling}; supported are mean, last, cls and max "
            "(set one with --pooling-type)"
        )

    @property
    def scores_pairs(self) -> bool:
        """True if the model reads a query and a document together to score them."""
        return self.reranker is not None or self.info.has_score_head

    def check_task(self, pooling: Pooling | None) -> None:
        """Raise UnsupportedError if the model cannot do this; None: generate text."""
        use = "/v1/rerank and /score" if self.info.has_score_head else "embeddings"
        if pooling is None and not self.info.generates:
            why = "is an encoder, which generates no text"
            why = why if self.info.is_encoder else "has no head that generates text"
            raise UnsupportedError(f"{self.name} {why}; use it for {use}", param="model")
        if pooling == "score" and not self.scores_pairs:
            raise UnsupportedError(f"{self.name} does not score pairs; use it for {use}", param="model")
        if pooling not in (None, "score") and self.info.has_score_head:
            raise UnsupportedError(f"{self.name} has no embeddings; use it for {use}", param="model")

    def score_token_ids(self, pooling: Pooling | None) -> tuple[int, int] | None:
        """Return the tokens whose logprobs make the score of a request with this pooling; None for others."""
        return self.reranker.token_ids if pooling == "score" and self.reranker is not None else None

    def pair_prompt(
        self, query: str, document: str, instruction: str | None, n_max: int | None
    ) -> PairPrompt:
        """Return the prompt that scores a document for a query, of `n_max` tokens at most.

        Raises UnsupportedError if the model does not score pairs or has no instruction. See
        `YesNoReranker.prompt` and `Tokenizer.encode_pair`.
        """
        reranker = self.pair_reranker(instruction)
        if reranker is None:
            return self.tokenizer.encode_pair(query, document, n_max)
        body = reranker.body(query, document, instruction)
        return PairPrompt(reranker.prompt(self.tokenizer.encode(body, add_special_tokens=False), n_max))

    def pair_reranker(self, instruction: str | None) -> YesNoReranker | None:
        """Return `reranker`; None for a model with a score head. Raises UnsupportedError for others."""
        if not self.scores_pairs:
            raise UnsupportedError(f"{self.name} does not score pairs of texts", param="model")
        if instruction is not None and self.reranker is None:
            raise UnsupportedError(
                f"instruction is only for rerankers with a prompt; {self.name} has a score head",
                param="instruction",
            )
        return self.reranker

    def grammar_compiler(self) -> GrammarCompiler:
        """Return the grammar compiler of this model, for structured outputs."""
        info = self.info
        eos = tuple(info.eos_token_ids)
        return GrammarCompiler(GrammarTokenizer(self.tokenizer.to_json(), eos, info.vocab_size))


def load_model_assets(config: Config) -> ModelAssets:
    """Resolve `config.model`, read everything except the weights, and validate the session store.

    Raises RejectedError or UnsupportedError naming the model or the setting.
    """
    if config.models:
        raise RejectedError("models is only for `llaisys serve`; set one model here", param="models")
    if config.session_store is not None:
        check_store(config.session_store)
    if config.prefix_cache_dir is not None:
        check_store(config.prefix_cache_dir, "prefix_cache_dir")
    resolved = resolve_model(config.model, config.revision)
    info = inspect_model(resolved.path)
    _log_skipped_tensors(info)
    defaults: dict[str, Any] = {}
    if config.generation_config == "auto":
        defaults = {**resolved.sampling_defaults, **info.generation}
        SamplingParams(**defaults)  # an invalid generation_config.json fails the start, not each request
    tokenizer = load_tokenizer(info)
    model = ModelAssets(
        name=resolved.name,
        info=info,
        tokenizer=tokenizer,
        template=load_chat_template(info, config.chat_template),
        sampling_defaults=defaults,
        pooling=model_pooling(info) if config.pooling_type == "auto" else config.pooling_type,
        normalizes=model_normalizes(info),
        reranker=load_reranker(info, tokenizer, config.score_type, resolved.name),
        draft=_draft(config),
    )
    model.tokenizer.warm_up()
    return model


def _log_skipped_tensors(info: ModelInfo) -> None:
    """Log, in one line, how many tensors of other parts than the text model are skipped."""
    if not info.skipped_tensors:
        return
    counts = ", ".join(f"{prefix}* {n}" for prefix, n in info.skipped_tensors.items())
    log.info(
        "%s is multimodal or predicts several tokens; its text model %s is loaded, and %d tensors of other "
        "parts are skipped (%s)",
        info.path,
        info.architecture,
        sum(info.skipped_tensors.values()),
        counts,
    )


def _draft(config: Config) -> ModelInfo | None:
    """Return the metadata of the draft model. Raises RejectedError or UnsupportedError."""
    speculation = config.speculative_config
    if speculation is None or speculation.model is None:
        return None
    return inspect_model(resolve_model(speculation.model, None).path)
