"""The progress bar of a load."""

from __future__ import annotations

import io
import re
import sys

import pytest

from llaisys.engine.load_progress import loading_bar


def test_the_bar_ends_at_the_size_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, packed = io.StringIO(), [0]
    monkeypatch.setattr(sys, "stderr", screen)
    with loading_bar("m.gguf", lambda: (packed[0], 3_000_000), shown=True):
        packed[0] = 3_000_000
    last = screen.getvalue().split("\r")[-1]
    assert re.match(r"loading m\.gguf: 100%\|.*3\.00M/3\.00M", last), screen.getvalue()


def test_the_bar_of_a_failed_load_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(OSError, match="damaged"), loading_bar("m.gguf", lambda: (1_000, 4_000), shown=True):
        raise OSError("damaged")
    assert re.search(r" 25%\|.*1\.00k/4\.00k", screen.getvalue().split("\r")[-1])


def test_no_bar_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with loading_bar("m.gguf", lambda: (0, 0), shown=False):
        pass
    assert screen.getvalue() == ""
