"""Read server-sent events strictly: every byte of a stream must belong to a known frame."""

from __future__ import annotations

import json
from typing import Any


def events(raw: bytes) -> list[Any]:
    """Return the frames of a whole stream: parsed JSON, `"[DONE]"`, or `"ping"`."""
    text = raw.decode("utf-8")
    assert text.endswith("\n\n"), text[-80:]
    return [_event(frame) for frame in text.removesuffix("\n\n").split("\n\n")]


def _event(frame: str) -> Any:
    if frame == ": ping":
        return "ping"
    assert frame.startswith("data: "), frame
    assert "\n" not in frame, frame
    data = frame.removeprefix("data: ")
    return "[DONE]" if data == "[DONE]" else json.loads(data)


def chunks(raw: bytes) -> list[dict[str, Any]]:
    """Return the JSON frames of a stream that ends with its only `[DONE]`."""
    found = events(raw)
    assert found.count("[DONE]") == 1
    assert found[-1] == "[DONE]"
    return [event for event in found[:-1] if event != "ping"]


def named_events(raw: bytes) -> list[dict[str, Any]]:
    """Return the events of a whole stream without pings. The name of each is the `type` of its data."""
    text = raw.decode("utf-8")
    assert text.endswith("\n\n"), text[-80:]
    found = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        if frame == ": ping":
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert data.startswith("data: "), frame
        assert name == f"event: {event['type']}", frame
        found.append(event)
    return found
