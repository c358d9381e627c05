"""The loop of `llaisys chat`, on a scripted model and scripted input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from llaisys.cli.chat import Conversation
from llaisys.errors import ContextLengthError, EngineDeadError


class Model:
    """Return scripted texts; raise a scripted exception."""

    def __init__(self, *script: str | BaseException) -> None:
        self._script = iter(script)
        self.conversations: list[list[str]] = []

    def chat(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], show: Callable[[str], None]
    ) -> None:
        assert fields == {"temperature": 0}
        self.conversations.append([message["content"] for message in messages])
        for piece in self._script:
            if isinstance(piece, BaseException):
                raise piece
            if not piece:
                return
            show(piece)


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def types(*lines: str | BaseException) -> None:
        script: Iterator[str | BaseException] = iter((*lines, EOFError()))

        def read(_: str) -> str:
            line = next(script)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)

    return types


def talk(model: Model, system: str | None = None) -> None:
    Conversation(model, {"temperature": 0}, system).run()


def test_earlier_messages_are_sent(person: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    person("one", " ", "two", "/clear", "three", "/exit", "never")
    model = Model("a", "b", "", "c", "", "d", "")
    talk(model, "be brief")
    assert model.conversations == [
        ["be brief", "one"],
        ["be brief", "one", "ab", "two"],
        ["be brief", "three"],
    ]
    assert capsys.readouterr().out == "ab\nc\nd\n"


def test_a_rejected_message_is_dropped(
    person: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    person("far too long", "short")
    model = Model(ContextLengthError("9 > 8"), "ok", "")
    talk(model)
    assert model.conversations == [["far too long"], ["short"]]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("ok\n", "llaisys chat: 9 > 8\n")


def test_a_stopped_completion_stays(person: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    person("one", "two")
    model = Model("half", KeyboardInterrupt(), "rest", "")
    talk(model)
    assert model.conversations == [["one"], ["one", "half", "two"]]
    assert capsys.readouterr().out == "half\nrest\n"


def test_ctrl_c_at_the_prompt_quits(person: Callable[..., None]) -> None:
    person(KeyboardInterrupt(), "never")
    model = Model()
    talk(model)
    assert model.conversations == []


def test_a_dead_engine_ends_the_chat(person: Callable[..., None]) -> None:
    person("one", "never")
    with pytest.raises(EngineDeadError):
        talk(Model(EngineDeadError("gone")))


def test_help_lists_the_commands(person: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    person("/help")
    talk(Model())
    assert "/clear" in capsys.readouterr().out
