"""The choices of a whole answer: the chunks of its stream added up, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from llaisys.server.errors import to_json
from llaisys.server.pieces import JsonList, JsonText, Part

Json: TypeAlias = dict[str, Any]
LOGPROB_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
TEXTS = ("content", "reasoning", "reasoning_content")
# Of a choice without its lists and texts: names, brackets, reasons.
CHOICE_BYTES = 256


class WholeCompletion:
    """A choice of a completion: texts, ids and logprobs concatenated, the end from the last chunk."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._text = JsonText()
        self._logprobs: dict[str, JsonList] = {}
        self._token_ids: JsonList | None = None
        self._end: Json = {"finish_reason": None, "stop_reason": None}

    def add(self, choice: Mapping[str, Any]) -> int:
        """Adds the choice of a chunk; returns the bytes that the answer has grown by."""
        n_bytes = self._text.add(choice["text"])
        if choice["logprobs"] is not None:
            self._logprobs = self._logprobs or {name: JsonList() for name in LOGPROB_LISTS}
            n_bytes += sum(made.extend(choice["logprobs"][name]) for name, made in self._logprobs.items())
        if "token_ids" in choice:
            self._token_ids = self._token_ids or JsonList()
            n_bytes += self._token_ids.extend(choice["token_ids"])
        self._end = {name: choice[name] for name in self._end}
        return n_bytes

    def parts(self, more: Mapping[str, JsonList | None]) -> list[Part]:
        """The object. `more`: lists behind its own fields; None is null."""
        out: list[Part] = [f'{{"index":{self.index},"text":"'.encode(), self._text.data, b'","logprobs":']
        out += _object(self._logprobs) if self._logprobs else [b"null"]
        out += [b",", to_json(self._end)[1:-1]]
        if self._token_ids is not None:
            out += [b',"token_ids":[', self._token_ids.data, b"]"]
        for name, value in more.items():
            out += [f',"{name}":'.encode(), *([b"null"] if value is None else [b"[", value.data, b"]"])]
        return [*out, b"}"]


class WholeChat:
    """A choice of a chat: its deltas are one message. Content is null where there is only something else."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._texts: dict[str, JsonText] = {}
        self._calls: list[Json] = []
        self._logprobs = JsonList()
        self._token_ids: JsonList | None = None
        self._end: Json = {"finish_reason": None, "stop_reason": None}

    def add(self, choice: Mapping[str, Any]) -> int:
        """Adds the choice of a chunk; returns the bytes that the answer has grown by."""
        delta, n_bytes = choice["delta"], 0
        for name in TEXTS:
            if delta.get(name):
                n_bytes += self._texts.setdefault(name, JsonText()).add(delta[name])
        for call in delta.get("tool_calls", ()):
            n_bytes += len(to_json(call))
            self._add_call(call)
        if choice["logprobs"] is not None:
            n_bytes += self._logprobs.extend(choice["logprobs"]["content"])
        if "token_ids" in choice:
            self._token_ids = self._token_ids or JsonList()
            n_bytes += self._token_ids.extend(choice["token_ids"])
        self._end = {name: choice[name] for name in self._end}
        return n_bytes

    def _add_call(self, call: Mapping[str, Any]) -> None:
        """A call comes in two deltas: its name, then its arguments."""
        if "id" in call:
            self._calls.append({name: value for name, value in call.items() if name != "index"})
            return
        function = self._calls[call["index"]]["function"]
        arguments = function["arguments"] + call["function"]["arguments"]
        self._calls[call["index"]]["function"] = {**function, "arguments": arguments}

    def parts(self, *, has_logprobs: bool) -> list[Part]:
        """The object."""
        texts = dict(self._texts)
        content = texts.pop("content", None)
        out: list[Part] = [f'{{"index":{self.index},"message":{{"role":"assistant","content":'.encode()]
        if content is not None:
            out += [b'"', content.data, b'"']
        else:
            out += [b"null" if self._calls or texts else b'""']
        out += [b',"refusal":null']
        for name, text in texts.items():
            out += [f',"{name}":"'.encode(), text.data, b'"']
        if self._calls:
            out += [b',"tool_calls":', to_json(self._calls)]
        out += [b'},"logprobs":']
        out += _object({"content": self._logprobs}) if has_logprobs else [b"null"]
        out += [b",", to_json(self._end)[1:-1]]
        if self._token_ids is not None:
            out += [b',"token_ids":[', self._token_ids.data, b"]"]
        return [*out, b"}"]


def _object(lists: Mapping[str, JsonList]) -> list[Part]:
    """An object of lists."""
    out: list[Part] = []
    for name, made in lists.items():
        out += [f'{"," if out else "{"}"{name}":['.encode(), made.data, b"]"]
    return [*out, b"}"]


def between(choices: list[list[Part]], separator: bytes = b",") -> list[Part]:
    """All parts, with a separator between one and the next."""
    out: list[Part] = []
    for parts in choices:
        out += [separator, *parts] if out else parts
    return out
