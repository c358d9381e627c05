"""The texts that `llaisys chat --url` reads from a stream."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import cast

import pytest

from llaisys.cli.remote_model import _texts
from llaisys.errors import RequestFailedError


class Response:
    """A response of status 200 with these deltas."""

    status = 200

    def __init__(self, *deltas: dict[str, str]) -> None:
        self._deltas = deltas

    def __iter__(self) -> Iterator[bytes]:
        for delta in self._deltas:
            yield b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n"
            yield b"\n"
        yield b"data: [DONE]\n"


def text_of(*deltas: dict[str, str]) -> str:
    return "".join(_texts(cast("http.client.HTTPResponse", Response(*deltas))))


def test_reasoning_is_in_tags_as_in_the_text_of_a_local_model() -> None:
    opening = {"role": "assistant", "content": ""}
    thoughts = [{"reasoning": each, "reasoning_content": each} for each in ("h", "m")]
    assert text_of(opening, {"content": "a"}, {"content": "b"}) == "ab"
    assert (
        text_of(opening, *thoughts, {"content": "Yes"}, {"content": "."}) == "<think>\nhm\n</think>\n\nYes."
    )
    assert text_of(opening, *thoughts) == "<think>\nhm"


def test_an_error_in_the_stream_is_raised() -> None:
    class Broken(Response):
        def __iter__(self) -> Iterator[bytes]:
            yield b'data: {"error": {"message": "gone"}}\n'

    with pytest.raises(RequestFailedError, match="gone"):
        list(_texts(cast("http.client.HTTPResponse", Broken())))
