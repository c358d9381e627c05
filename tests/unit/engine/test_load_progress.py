"""The progress bar of a load."""

from __future__ import annotations

import io
import re
import sys

import pytest

from llaisys.engine.load_progress import loading_bar


def test_the_progress_bar_ends_at_the_size_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, packed = io.StringIO(), [0]
    monkeypatch.setattr(sys, "stderr", stream)
    with loading_bar("m.gguf", lambda: (packed[0], 3_000_000), shown=True):
        packed[0] = 3_000_000
    last = stream.getvalue().split("\r")[-1]
    assert re.match(r"loading m\.gguf: 100%\|.*3\.00M/3\.00M", last), stream.getvalue()


def test_the_progress_bar_of_a_failed_load_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(OSError, match="damaged"), loading_bar("m.gguf", lambda: (1_000, 4_000), shown=True):
        raise OSError("damaged")
    assert re.search(r" 25%\|.*1\.00k/4\.00k", stream.getvalue().split("\r")[-1])


def test_no_progress_bar_without_a_progress_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with loading_bar("m.gguf", lambda: (0, 0), shown=False):
        pass
    assert stream.getvalue() == ""
