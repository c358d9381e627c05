"""ModelTokenizer: the tokenizer of a loaded model for Python programs, as `LLM.get_tokenizer` returns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from llaisys.model_assets import ModelAssets
from llaisys.text.chat_template import special_tokens


class ModelTokenizer:
    """Has the methods and ids of Hugging Face's tokenizers that programs use, under the same names.

    It needs no transformers, and does not change. Threads may share it.
    """

    def __init__(self, model: ModelAssets) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._special = special_tokens(model.info)

    # --- special tokens ---

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text."""
        return self._special.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text."""
        return self._special.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The token that fills a batch; the engine never uses it."""
        return self._special.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The token of text that the vocabulary cannot represent."""
        return self._special.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`."""
        return self._id_of(self.bos_token, self._model.info.bos_token_id)

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`; a model may have further ids that end a completion."""
        return self._id_of(self.eos_token, next(iter(self._model.info.eos_token_ids), None))

    @property
    def pad_token_id(self) -> int | None:
        """The id of `pad_token`."""
        return self._id_of(self.pad_token, None)

    @property
    def unk_token_id(self) -> int | None:
        """The id of `unk_token`."""
        return self._id_of(self.unk_token, None)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids that `skip_special_tokens` leaves out, ascending."""
        return sorted(self._tokenizer.special_ids)

    @property
    def chat_template(self) -> str | None:
        """The text of the model's chat template."""
        return None if self._model.template is None else self._model.template.source.texts["default"]

    # --- vocabulary ---

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return self._tokenizer.vocab_size

    def __len__(self) -> int:
        """Return `vocab_size`."""
        return self._tokenizer.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary, entry -> id."""
        return self._tokenizer.vocab()

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """Return the vocabulary entry of an id or of each id; empty for an id without one."""
        if isinstance(ids, int):
            return self._tokenizer.vocab_text(ids)
        return [self._tokenizer.vocab_text(id) for id in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """Return the id of a vocabulary entry or of each entry; `unk_token_id` for an unknown one."""
        if isinstance(tokens, str):
            id = self._tokenizer.token_id(tokens)
            return self.unk_token_id if id is None else id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    # --- text ---

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RejectedError if it cannot be encoded."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of an id or of ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens)

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: Literal[True] = True,
        **options: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: Literal[False],
        **options: Any,
    ) -> str: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """Return the prompt of a conversation, as token ids or, without `tokenize`, as text.

        `chat_template`: the text of a template that replaces the model's. `kwargs`: further variables of the
        template. Raises UnsupportedError if the model has no template, RejectedError for invalid messages.
        """
        options = {
            **kwargs,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        template = self._model.chat_template(chat_template)
        text, ids = self._model.chat_prompt(conversation, options, template)
        return ids if tokenize else text

    def _id_of(self, token: str | None, default: int | None) -> int | None:
        return default if token is None else self._tokenizer.token_id(token)
