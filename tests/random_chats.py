"""Random completions of a chat, and clients that disconnect, for the tests of the chat protocols."""

from __future__ import annotations

import json
import random
from typing import Any

from starlette.types import ASGIApp, Message

from fakes.service import Piece, PieceOrError
from llaisys.errors import EngineDeadError, QueueFullError, RequestFailedError
from llaisys.output_parts import Content, OutputPart, Reasoning, ToolCall

TEXTS = ("Hi", " there\n", "天🦙", "<tool", "a < b ", '{"', "\n\n", "</", "é")


class RandomCompletion:
    """Reasoning, texts and calls of the function `add`, and the script in which a model writes them.

    The parsers `qwen3` and `hermes` return `parts` unchanged. `fails`: the script ends with an error.
    """

    def __init__(self, draw: random.Random, *, reasons: bool = True, calls: bool = True) -> None:
        self._draw = draw
        self.parts: list[OutputPart] = []
        if reasons and draw.random() < 0.5:
            self.parts.append(Reasoning(self._text()))
        for _ in range(draw.randint(0, 3)):
            if calls and draw.random() < 0.5:
                arguments = {"a": draw.randint(0, 9), "b": self._text()}
                self.parts.append(ToolCall("add", json.dumps(arguments, ensure_ascii=False)))
            elif not (self.parts and isinstance(self.parts[-1], Content)):
                self.parts.append(Content(self._text()))
        self.script = [*self._pieces(), self._end()]

    @property
    def fails(self) -> bool:
        return isinstance(self.script[-1], Exception)

    def _text(self) -> str:
        texts = self._draw.choices(TEXTS, k=self._draw.randint(0, 3))
        return "".join(["x", *texts, "y"])

    def _pieces(self) -> list[PieceOrError]:
        """Return the text in pieces of random lengths."""
        text = ""
        for part in self.parts:
            match part:
                case Content(content):
                    text += content
                case Reasoning(content):
                    text += f"<think>{content}</think>"
                case ToolCall(name, arguments):
                    text += f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        pieces: list[PieceOrError] = []
        while text:
            n = self._draw.randint(1, 12)
            pieces.append(Piece([text[:n]]))
            text = text[n:]
        return pieces

    def _end(self) -> PieceOrError:
        return self._draw.choice(
            [Piece([], "stop"), Piece([], "stop", "END"), Piece([], "stop", 7), Piece([], "length")] * 3
            + [EngineDeadError("gone"), RequestFailedError("broken"), QueueFullError("full")]
        )


class Leaver:
    """An ASGI client that may disconnect after a number of messages."""

    def __init__(self, app: ASGIApp, n_messages: int) -> None:
        self._app = app
        self._n_left = n_messages

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body_is_read = False

        async def receive_or_leave() -> Message:
            nonlocal body_is_read
            if body_is_read and self._n_left <= 0:
                return {"type": "http.disconnect"}
            body_is_read = True
            message: Message = await receive()
            return message

        async def send_counted(message: Message) -> None:
            self._n_left -= 1
            await send(message)

        await self._app(scope, receive_or_leave, send_counted)
