"""The text side of a loaded model: its facts, tokenizer, chat template and sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llaisys.config import Config
from llaisys.engine.grammar import Grammars, GrammarTokens
from llaisys.engine.session_file import check_store
from llaisys.engine.worker import inspect_model
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.hub import resolve_model
from llaisys.text.pooling import DEFAULT as DEFAULT_POOLING
from llaisys.text.pooling import model_pooling
from llaisys.text.template import ChatTemplate, load_chat_template
from llaisys.text.tokenizer import Tokenizer, load_tokenizer
from llaisys.types import ModelInfo, Pooling, SamplingParams


@dataclass(frozen=True, slots=True)
class Model:
    """Immutable, usable from any thread.

    - `name`: what the model is called where nobody named it otherwise.
    - `sampling_defaults`: SamplingParams fields that the model's makers (or our registry) set.
    - `pooling`: how its embeddings are pooled, by the setting or its makers; perhaps as we do not.
    """

    name: str
    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    sampling_defaults: Mapping[str, Any]
    pooling: str = DEFAULT_POOLING

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[str, list[int]]:
        """Text and token ids of a conversation. `options` are those of `ChatTemplate.render`.

        Raises UnsupportedError (no template) or RejectedError (the messages).
        """
        text = self.chat_template().render(messages, **options)
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    def chat_template(self) -> ChatTemplate:
        """The template. Raises UnsupportedError if the model has none."""
        if self.template is None:
            raise UnsupportedError(
                f"{self.name} has no chat template; give one with --chat-template, or use plain completions",
                param="messages",
            )
        return self.template

    def embedding_pooling(self) -> Pooling:
        """Raises UnsupportedError naming what the model's embeddings need and we do not have."""
        match self.pooling:
            case "mean" | "last" as pooling:
                return pooling
        raise UnsupportedError(
            f"{self.name} makes embeddings with {self.pooling}; supported are mean and last "
            "(--pooling-type takes one of them all the same)"
        )

    def grammars(self) -> Grammars:
        """For structured outputs of this model."""
        info = self.info
        eos = tuple(info.eos_token_ids)
        return Grammars(GrammarTokens(self.tokenizer.to_json(), eos, info.vocab_size))

    def warm_up(self) -> None:
        """Builds what the tokenizer builds at its first use, so that no request waits for it."""
        self.tokenizer.decode(self.tokenizer.encode("Hello, world", add_special_tokens=True), True)


def open_model(config: Config) -> Model:
    """Finds `config.model` and reads all of it but the weights; the tokenizer is warm. The session store
    is checked, too.

    Raises RejectedError or UnsupportedError, naming the model or the setting.
    """
    if config.models:
        raise RejectedError("models is for `llaisys serve`; give one model here", param="models")
    if config.session_store is not None:
        check_store(config.session_store)
    resolved = resolve_model(config.model, config.revision)
    info = inspect_model(resolved.path)
    defaults: dict[str, Any] = {}
    if config.generation_config == "auto":
        defaults = {**resolved.sampling_defaults, **info.generation}
        SamplingParams(**defaults)  # a bad generation_config.json stops the start, not each request
    model = Model(
        name=resolved.name,
        info=info,
        tokenizer=load_tokenizer(info),
        template=load_chat_template(info, config.chat_template),
        sampling_defaults=defaults,
        pooling=model_pooling(info) if config.pooling_type == "auto" else config.pooling_type,
    )
    model.warm_up()
    return model
