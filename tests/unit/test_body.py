"""Bounds of a JSON body, each at its limit and one above."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llaisys import body
from llaisys.body import DEEP_DEPTH_MAX, DEPTH_MAX, parse_body
from llaisys.errors import RejectedError


def nested(depth: int) -> Any:
    """Return `depth` nested lists."""
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"x": nested(DEPTH_MAX - 1)}, None),
        ({"x": nested(DEPTH_MAX)}, "x"),
        ({"tools": nested(DEEP_DEPTH_MAX - 1)}, None),
        ({"tools": nested(DEEP_DEPTH_MAX)}, "tools"),
        (nested(DEPTH_MAX - 1), None),
        (nested(DEPTH_MAX), "the body"),
        ({"x": [[]] * 99}, None),
        ({"x": [[]] * 50, "y": [{}] * 49}, "y"),
        ({"x": [1] * 1000}, None),
        ({"x": [1] * 999, "y": [1, 2]}, "y"),
        ({"x": {str(i): 1 for i in range(1001)}}, "x"),
        ({"prompt": [1] * 1500, "x": [1] * 1000}, None),
        ({"prompt": [1] * 1000, "tokens": [1] * 501}, "tokens"),
    ],
)
def test_bounds_of_a_json_body(value: Any, param: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "CONTAINERS_MAX", 100)
    monkeypatch.setattr(body, "VALUES_MAX", 1500)
    monkeypatch.setattr(body, "OTHER_VALUES_MAX", 1000)
    raw = json.dumps(value).encode()
    if param is None:
        assert parse_body(raw) == value
    else:
        with pytest.raises(RejectedError) as caught:
            parse_body(raw)
        assert caught.value.param == param


@pytest.mark.parametrize("raw", [b"", b"{", b'"\xff"', b"[" * 100_000, b"1" * 5000])
def test_invalid_json_is_rejected(raw: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)) as caught:
        parse_body(raw)
    assert not isinstance(caught.value, RejectedError)


@pytest.mark.parametrize("value", [None, 1, "x", [], {}, {"": {"": ""}}])
def test_any_json_value_is_parsed(value: Any) -> None:
    assert parse_body(json.dumps(value).encode()) == value
