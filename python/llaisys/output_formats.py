"""OutputFormats: how a model marks tool calls and reasoning, by the settings or by its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llaisys.config import Config
from llaisys.output_parts import CompletionOutputParser, ReasoningFormat
from llaisys.sampling_params import SamplingParams, StructuredOutputsParams
from llaisys.text.chat_template import ChatTemplate
from llaisys.text.reasoning import CompletionParser, marks_reasoning, reasoning_format_of
from llaisys.text.thoughts import thought_format_of, writes_thoughts
from llaisys.text.tokenizer import Tokenizer
from llaisys.text.tool_calls import (
    TOOL_TAGS,
    ToolFormat,
    gemma4,
    harmony,
    tool_format_of,
    tool_grammar,
    tool_parser,
)

# Tokens at the end of a prompt that contain the opening of reasoning and the whitespace after it.
_THINK_TOKENS_MAX = 8
# Format of enforced calls if the model's own is unknown.
_DEFAULT_TOOL_FORMAT: ToolFormat = "hermes"


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats of one model. `tool`: None if the chat template shows none that is known.

    `template`: the text of the chat template; empty without one.
    """

    tool: ToolFormat | None
    reasoning: ReasoningFormat | None
    template: str
    tokenizer: Tokenizer

    @staticmethod
    def of(config: Config, template: ChatTemplate | None, tokenizer: Tokenizer) -> OutputFormats:
        """Return the formats that `tool_call_parser` and `reasoning_parser` set, or the template shows."""
        text = "" if template is None else template.text
        tool = config.tool_call_parser or tool_format_of(text)
        return OutputFormats(tool, config.reasoning_parser, text, tokenizer)

    def tool_grammar(
        self, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool
    ) -> StructuredOutputsParams:
        """Return the grammar of a completion that calls tools, once or, with `parallel`, several times.

        `tools`: name -> JSON schema of the arguments.
        """
        grammar = tool_grammar(
            self.tool or _DEFAULT_TOOL_FORMAT,
            tools,
            parallel=parallel,
            template=self.template,
            special_ids=self._token_tags(),
        )
        return StructuredOutputsParams(grammar=grammar)

    def parsed_params(self, params: SamplingParams, *, has_tools: bool) -> SamplingParams:
        """Return the parameters with which the parts of a completion can be parsed.

        Special tokens that mark parts are shown, and a message that ends the turn ends the completion.
        """
        ids = [id for tag in self._end_tags() if (id := self.tokenizer.token_id(tag)) is not None]
        if ids and not params.ignore_eos:
            params = replace(params, stop_token_ids=[*dict.fromkeys([*params.stop_token_ids, *ids])])
        if self.has_channels or (has_tools and self._has_special_tags()):
            return replace(params, skip_special_tokens=False)
        return params

    @property
    def has_channels(self) -> bool:
        """Return True if reasoning is in a channel, whose tags plain text does not show."""
        return self.writes_channels or self.writes_thoughts

    @property
    def writes_thoughts(self) -> bool:
        """Return True if completions may have thoughts in a channel (Gemma 4)."""
        if self.reasoning is not None:
            return self.reasoning == "gemma4"
        return writes_thoughts(self.template)

    @property
    def writes_channels(self) -> bool:
        """Return True if completions are messages in channels (gpt-oss)."""
        if self.reasoning is not None:
            return self.reasoning == "openai_gptoss"
        return self.tool == "openai" or harmony.is_harmony(self.template)

    @property
    def has_reasoning(self) -> bool:
        """Return True if completions may contain reasoning."""
        return self.reasoning is not None or marks_reasoning(self.template)

    def reasoning_of(self, prompt: Sequence[int]) -> ReasoningFormat | None:
        """Return how a completion of this prompt marks its reasoning; None if it has none."""
        if self.reasoning is not None and not self.writes_thoughts:
            return self.reasoning
        if not self.has_reasoning:
            return None
        if self.writes_channels:
            return "openai_gptoss"
        prompt_end = self.tokenizer.decode(list(prompt[-_THINK_TOKENS_MAX:]), False)
        return thought_format_of(prompt_end) if self.writes_thoughts else reasoning_format_of(prompt_end)

    def parser(
        self,
        params: SamplingParams,
        tools: Mapping[str, Mapping[str, Any]],
        reasoning: ReasoningFormat | None,
    ) -> CompletionOutputParser | None:
        """Return a parser of one choice for reasoning, content and calls of these tools.

        None if there is nothing to parse, so that the whole completion is content.

        `tools`: name -> JSON schema of the arguments. A completion under a grammar has no reasoning.
        """
        reasoning = None if params.structured_outputs is not None else reasoning
        if reasoning is None and not tools:
            return None
        if reasoning == "openai_gptoss" and self.tool == "openai":
            return CompletionParser(reasoning, None, tools)
        parser = tool_parser(self.tool or _DEFAULT_TOOL_FORMAT, tools) if tools else None
        return CompletionParser(reasoning, parser)

    def _end_tags(self) -> tuple[str, ...]:
        """Return the tokens that end a turn in the model's format."""
        if self.writes_channels:
            return harmony.END_TAGS
        return gemma4.END_TAGS if self.writes_thoughts or self.tool == "gemma4" else ()

    def _has_special_tags(self) -> bool:
        """Return True if tags of calls are special tokens, which are hidden by default."""
        return any(map(self.tokenizer.is_special, self._token_tags().values()))

    def _token_tags(self) -> dict[str, int]:
        """Return the ids of the tags of calls that are tokens added to the vocabulary.

        A grammar needs their ids: llguidance treats added tokens in angle brackets as special ones.
        """
        ids = {tag: self.tokenizer.token_id(tag) for tag in TOOL_TAGS[self.tool or _DEFAULT_TOOL_FORMAT]}
        return {tag: id for tag, id in ids.items() if id is not None and self.tokenizer.is_added(id)}
