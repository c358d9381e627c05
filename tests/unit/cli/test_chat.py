"""The loop of `llaisys chat`, on a scripted model and a scripted person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from llaisys.cli.chat import Conversation
from llaisys.errors import ContextLengthError, EngineDeadError


class Model:
    """Says what it is told to; an exception in place of a text is raised."""

    def __init__(self, *script: str | BaseException) -> None:
        self._script = iter(script)
        self.asked: list[list[str]] = []

    def chat(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], show: Callable[[str], None]
    ) -> None:
        assert fields == {"temperature": 0}
        self.asked.append([message["content"] for message in messages])
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


def test_what_was_said_is_sent_along(person: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    person("one", " ", "two", "/clear", "three", "/exit", "never")
    model = Model("a", "b", "", "c", "", "d", "")
    talk(model, "be brief")
    assert model.asked == [["be brief", "one"], ["be brief", "one", "ab", "two"], ["be brief", "three"]]
    assert capsys.readouterr().out == "ab\nc\nd\n"


def test_a_refused_message_is_forgotten(
    person: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    person("far too long", "short")
    model = Model(ContextLengthError("9 > 8"), "ok", "")
    talk(model)
    assert model.asked == [["far too long"], ["short"]]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("ok\n", "llaisys chat: 9 > 8\n")


def test_a_stopped_answer_stays(person: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    person("one", "two")
    model = Model("half", KeyboardInterrupt(), "rest", "")
    talk(model)
    assert model.asked == [["one"], ["one", "half", "two"]]
    assert capsys.readouterr().out == "half\nrest\n"


def test_ctrl_c_at_the_prompt_leaves(person: Callable[..., None]) -> None:
    person(KeyboardInterrupt(), "never")
    model = Model()
    talk(model)
    assert model.asked == []


def test_a_dead_engine_ends_it(person: Callable[..., None]) -> None:
    person("one", "never")
    with pytest.raises(EngineDeadError):
        talk(Model(EngineDeadError("gone")))


def test_help(person: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    person("/help")
    talk(Model())
    assert "/clear" in capsys.readouterr().out
