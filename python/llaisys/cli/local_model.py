"""A model in this process, for commands that stream one completion at a time to a terminal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar, cast

from llaisys.async_llm import AsyncLLM
from llaisys.cli.reasoning_tags import ReasoningTags
from llaisys.config import Config
from llaisys.output_formats import OutputFormats
from llaisys.output_parts import Content, OutputPart, Reasoning, ToolCall
from llaisys.outputs import RequestOutput
from llaisys.sampling_params import RequestOutputKind, SamplingParams
from llaisys.text.reasoning import CompletionParser

Show = Callable[[str], None]
T = TypeVar("T")


class LocalModel:
    """Calls AsyncLLM from synchronous code, with an event loop that runs only during a completion.

    A context manager: it loads the model on entry and frees it on exit.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._engine: AsyncLLM | None = None
        self._n_requests = 0

    def __enter__(self) -> LocalModel:
        try:
            self._engine = self._run(AsyncLLM.start(self._config))
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._llm.close())
        self._run(self._loop.shutdown_asyncgens())
        self._run(self._loop.shutdown_default_executor())
        self._loop.close()

    def complete(self, prompt: str, fields: Mapping[str, Any], show: Show) -> None:
        """Complete a text and stream it to `show`. `fields`: SamplingParams that override the model's
        defaults.

        Raises KeyboardInterrupt after Ctrl-C has canceled the request; the model stays usable.
        """
        self._stream_completion(prompt, fields, show)

    def chat(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], show: Show) -> None:
        """Stream the next message of a conversation to `show`. As in the HTTP API, only the context limits
        it."""
        prompt = self._run(self._llm.chat_prompt(messages))
        formats, options = self._llm.output_formats, {"max_tokens": None, **fields}
        if not formats.has_channels:
            self._stream_completion(prompt, options, show)
            return
        # The tags of channels are special tokens, so the plain text would run the messages together.
        channels = ChannelText(formats, prompt, show)
        self._stream_completion(prompt, options, channels.push, is_parsed=True)
        channels.finish()

    @property
    def _llm(self) -> AsyncLLM:
        if self._engine is None:
            raise AssertionError("LocalModel is used outside of its `with` block")
        return self._engine

    def _stream_completion(
        self, prompt: str | list[int], fields: Mapping[str, Any], show: Show, *, is_parsed: bool = False
    ) -> None:
        deltas = {"output_kind": RequestOutputKind.DELTA}
        params = SamplingParams(**{**self._llm.default_sampling_params, **fields, **deltas})
        if is_parsed:
            params = self._llm.output_formats.parsed_params(params, has_tools=False)
        self._n_requests += 1
        stream = self._llm.generate(prompt, params, f"local-{self._n_requests}")
        task = self._loop.create_task(_show_deltas(stream, show))
        self._loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        if task.cancelled():
            raise KeyboardInterrupt
        task.result()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


class ChannelText:
    """Shows a completion in channels with its reasoning in tags."""

    def __init__(self, formats: OutputFormats, prompt: Sequence[int], show: Show) -> None:
        self._parser = CompletionParser(formats.reasoning_of(prompt), None)
        self._tags = ReasoningTags()
        self._show = show

    def push(self, text: str) -> None:
        """Show the parts that are final after the next piece of text."""
        self._show_parts(self._parser.push(text))

    def finish(self) -> None:
        """Show the rest of an ended completion."""
        self._show_parts(self._parser.finish())

    def _show_parts(self, parts: Sequence[OutputPart]) -> None:
        for part in parts:
            match part:
                case Reasoning(reasoning):
                    self._show(self._tags.text(reasoning, ""))
                case Content(content):
                    self._show(self._tags.text("", content))
                case ToolCall():
                    raise AssertionError("a completion without tools has no calls")


async def _show_deltas(stream: AsyncIterator[RequestOutput], show: Show) -> None:
    """Show a stream to its end; cancellation closes it, which cancels the request."""
    async with aclosing(cast("Any", stream)) as deltas:
        async for delta in deltas:
            show(delta.outputs[0].text)
