"""LLM: the blocking API for scripts, prompts in and completions out, complete or as a stream of deltas.

It runs the same engine as the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeAlias, overload

from llaisys.config import load_config
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.llm_pooling import PoolingMethods
from llaisys.lora_request import LorasOrOne, loras_of
from llaisys.model_assets import ModelAssets, load_model_assets
from llaisys.model_info import ModelInfo
from llaisys.model_tokenizer import ModelTokenizer
from llaisys.offline_engine import OfflineEngine, PreparedPrompt, ShowProgress, merge_deltas
from llaisys.outputs import RequestOutput
from llaisys.prompt import Prompt, as_prompt_list
from llaisys.sampling_params import SamplingParams
from llaisys.session_client import check_name
from llaisys.vllm_arguments import refuse

Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
ParamsOrList: TypeAlias = "SamplingParams | Sequence[SamplingParams]"
PriorityOrList: TypeAlias = "int | Sequence[int]"
PRIORITY_MAX = 2**31 - 1


class LLM(PoolingMethods):
    """Loads one model and generates completions. `close`, a `with` block or garbage collection frees it.

    `model` is a folder, a `.gguf` file or the name of an embedded model (`smollm2`). Every field of
    `llaisys.config.Config` is a keyword; an unknown keyword is an error.

    Several threads may call `generate` and `chat`; their requests share the engine's batches. Requests have
    no time limit unless `request_timeout_s` is set.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        quantization: str | None = None,
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        kv_cache_memory: int | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Load the model. `kv_cache_memory` is in bytes (`kv_cache_memory_bytes`).

        Raises RejectedError or UnsupportedError naming the setting or the model.
        """
        named = {
            "quantization": quantization,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "kv_cache_memory_bytes": kv_cache_memory,
        }
        given = {key: value for key, value in named.items() if value is not None}
        config = load_config(
            {"model": str(model), "dtype": dtype, "device": device, "seed": seed, **settings, **given}
        )
        self._model: ModelAssets = load_model_assets(config)
        self._engine = OfflineEngine(config, self._model)

    @property
    def model_info(self) -> ModelInfo:
        """Metadata of the checkpoint."""
        return self._model.info

    @property
    def max_model_len(self) -> int:
        """The longest request in tokens, prompt and completion together."""
        return self._engine.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's defaults, which `generate` uses without `sampling_params`."""
        return SamplingParams(**self._model.sampling_defaults)

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsOrList | None = None,
        *,
        use_tqdm: ShowProgress = True,
        lora_request: LorasOrOne = None,
        priority: PriorityOrList | None = None,
        tokenization_kwargs: None = None,
        stream: Literal[False] = False,
        session_id: str | Sequence[str] = "",
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsOrList | None = None,
        *,
        use_tqdm: ShowProgress = True,
        lora_request: LorasOrOne = None,
        priority: PriorityOrList | None = None,
        tokenization_kwargs: None = None,
        stream: Literal[True],
        session_id: str | Sequence[str] = "",
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsOrList | None = None,
        *,
        use_tqdm: ShowProgress = True,
        lora_request: LorasOrOne = None,
        priority: PriorityOrList | None = None,
        tokenization_kwargs: None = None,
        stream: bool = False,
        session_id: str | Sequence[str] = "",
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Return the completions in the order of the prompts; with `stream`, an iterator over deltas.

        - `prompts`: one prompt or several, each as text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or
          token ids.
        - `sampling_params`: one for all prompts, or one per prompt. None selects the model's defaults.
        - `use_tqdm`: show a progress bar on stderr; a callable makes it (`functools.partial(tqdm,
          leave=False)`). With `stream` there is none.
        - `priority`: one number for all prompts, or one per prompt. Lower runs first.
        - `session_id`: one session name per prompt, "" for no session. A new name creates a session, which
          keeps the request's KV. The prompt must still be the whole conversation.
        - `stream`: each item is a delta of one choice, whose one output has the new `text`, `token_ids` and
          `logprobs`. Deltas of several prompts are interleaved; request ids ascend in the order of the
          prompts. Nothing is submitted before the first item. Closing the iterator cancels open requests.
        - `lora_request`: the adapter of all prompts, or one or None per prompt; needs `enable_lora`. An
          adapter is loaded at its first use; one that is not in use is unloaded when max_loras are loaded.
        - `tokenization_kwargs`: of vLLM; only None is accepted.

        All prompts are validated before any of them runs. RejectedError names the field, ContextLengthError
        both lengths. A request that fails or times out does not stop the others. Its `finish_reason` is
        `error` or `timeout`, and the log has the cause. Raises EngineDeadError if the engine dies.
        """
        refuse(tokenization_kwargs=tokenization_kwargs)
        encoded = [self._engine.encode(prompt) for prompt in as_prompt_list(prompts)]
        per_prompt = _PerPrompt(session_id, priority, lora_request)
        prepared = self._prepare(encoded, sampling_params, per_prompt)
        return self._run(prepared, stream=stream, use_tqdm=use_tqdm)

    @overload
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsOrList | None = None,
        use_tqdm: ShowProgress = True,
        lora_request: LorasOrOne = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
        *,
        priority: PriorityOrList | None = None,
        stream: Literal[False] = False,
        session_id: str | Sequence[str] = "",
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsOrList | None = None,
        use_tqdm: ShowProgress = True,
        lora_request: LorasOrOne = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
        *,
        priority: PriorityOrList | None = None,
        stream: Literal[True],
        session_id: str | Sequence[str] = "",
    ) -> Iterator[RequestOutput]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsOrList | None = None,
        use_tqdm: ShowProgress = True,
        lora_request: LorasOrOne = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
        *,
        priority: PriorityOrList | None = None,
        stream: bool = False,
        session_id: str | Sequence[str] = "",
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Complete one conversation or several, rendered with the model's chat template.

        - `chat_template`: the text of a template that replaces the model's. It runs in the same sandbox.
        - `tools`: definitions of functions in OpenAI's format, for the template. A call stays in the `text`.
        - `chat_template_kwargs`: further variables for the template.
        - `chat_template_content_format`: "auto" and "string" are the same, because templates get the content
          of a message as one string.
        - `mm_processor_kwargs`: of vLLM; only None is accepted.

        Otherwise like `generate`. Raises UnsupportedError if the model has no template.
        """
        refuse(
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        if chat_template_content_format not in ("auto", "string"):
            raise UnsupportedError(
                f"chat_template_content_format is {chat_template_content_format!r}: templates get the "
                "content as one string; pass 'auto' or 'string'",
                param="chat_template_content_format",
            )
        self._engine.check_open()
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        options = {
            **(chat_template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        template = self._model.chat_template(chat_template) if conversations else None
        rendered = [self._model.chat_prompt(each, options, template) for each in conversations]
        per_prompt = _PerPrompt(session_id, priority, lora_request)
        prepared = self._prepare([*rendered], sampling_params, per_prompt)
        return self._run(prepared, stream=stream, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> ModelTokenizer:
        """Return the model's tokenizer."""
        return ModelTokenizer(self._model)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Remove all cached prefixes, except those of sessions; return True if that was done.

        While requests of another thread run, nothing is removed and False is returned, as in vLLM. The
        arguments are vLLM's; only False is accepted.
        """
        refuse(reset_running_requests=reset_running_requests or None, reset_connector=reset_connector or None)
        self._engine.check_open()
        return self._engine.client.reset_prefix_cache().result()

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- internals ---

    def _prepare(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: ParamsOrList | None,
        given: _PerPrompt,
    ) -> list[PreparedPrompt]:
        n = len(prompts)
        return self._engine.prepare(
            prompts,
            self._params(sampling_params, n),
            sessions=_sessions(given.session_id, n),
            priorities=_priorities(given.priority, n),
            loras=loras_of(given.lora_request, n),
        )

    def _run(
        self, prepared: Sequence[PreparedPrompt], *, stream: bool, use_tqdm: ShowProgress
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        deltas = self._engine.deltas(prepared, use_tqdm=False if stream else use_tqdm)
        return deltas if stream else merge_deltas(prepared, deltas)

    def _params(self, given: ParamsOrList | None, n_prompts: int) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * n_prompts
        if len(given) != n_prompts:
            raise RejectedError(
                f"{n_prompts} prompts and {len(given)} sampling_params: pass one for all, or one per prompt",
                param="sampling_params",
            )
        return given


@dataclass(frozen=True, slots=True)
class _PerPrompt:
    """Arguments with one value for all prompts, or one per prompt."""

    session_id: str | Sequence[str]
    priority: PriorityOrList | None
    lora_request: LorasOrOne


def _priorities(given: PriorityOrList | None, n_prompts: int) -> Sequence[int]:
    """Return one priority per prompt. Raises RejectedError."""
    if given is None or isinstance(given, int):
        given = [given or 0] * n_prompts
    if len(given) != n_prompts:
        raise RejectedError(
            f"{n_prompts} prompts and {len(given)} priority: pass one for all, or one per prompt",
            param="priority",
        )
    for each in given:
        if isinstance(each, bool) or not isinstance(each, int) or abs(each) > PRIORITY_MAX:
            raise RejectedError(
                f"priority is {each!r}, expected whole numbers from {-PRIORITY_MAX} to {PRIORITY_MAX}",
                param="priority",
            )
    return given


def _sessions(given: str | Sequence[str], n_prompts: int) -> Sequence[str]:
    """Return one session name per prompt. Raises RejectedError for an invalid or repeated name."""
    sessions = [""] * n_prompts if given == "" else [given] if isinstance(given, str) else given
    if len(sessions) != n_prompts:
        raise RejectedError(
            f"{n_prompts} prompts and {len(sessions)} session_id: pass one per prompt", param="session_id"
        )
    named = [name for name in sessions if name]
    for name in named:
        check_name(name)
    if len(named) > len(set(named)):
        raise RejectedError(
            "session_id names a session twice; name a different one for each prompt", param="session_id"
        )
    return sessions
