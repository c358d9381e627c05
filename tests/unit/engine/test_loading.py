"""The bar of a load: up to where the weights are."""

from __future__ import annotations

import io
import re
import sys

import pytest

from llaisys.engine.loading import loading_bar


def test_it_ends_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, packed = io.StringIO(), [0]
    monkeypatch.setattr(sys, "stderr", screen)
    with loading_bar("m.gguf", lambda: (packed[0], 3_000_000), shown=True):
        packed[0] = 3_000_000
    last = screen.getvalue().split("\r")[-1]
    assert re.match(r"loading m\.gguf: 100%\|.*3\.00M/3\.00M", last), screen.getvalue()


def test_a_load_that_fails_stops_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(OSError, match="damaged"), loading_bar("m.gguf", lambda: (1_000, 4_000), shown=True):
        raise OSError("damaged")
    assert re.search(r" 25%\|.*1\.00k/4\.00k", screen.getvalue().split("\r")[-1])


def test_nothing_is_shown_where_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with loading_bar("m.gguf", lambda: (0, 0), shown=False):
        pass
    assert screen.getvalue() == ""
