"""The bar of a load: on a terminal, up to where the weights are; nowhere else."""

from __future__ import annotations

import io
import re
import sys

import pytest

from llaisys.engine.loading import loading_bar


class Screen(io.StringIO):
    """A terminal that keeps what it was sent."""

    def isatty(self) -> bool:
        return True


class Progress:
    """As the compiled core's."""

    loading = (0, 0)


def test_it_ends_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, progress = Screen(), Progress()
    monkeypatch.setattr(sys, "stderr", screen)
    with loading_bar("m.gguf", progress):  # type: ignore[arg-type]
        progress.loading = (3_000_000, 3_000_000)
    last = screen.getvalue().split("\r")[-1]
    assert re.match(r"loading m\.gguf: 100%\|.*3\.00M/3\.00M", last), screen.getvalue()


def test_a_load_that_fails_stops_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, progress = Screen(), Progress()
    monkeypatch.setattr(sys, "stderr", screen)
    progress.loading = (1_000, 4_000)
    with pytest.raises(OSError, match="damaged"), loading_bar("m.gguf", progress):  # type: ignore[arg-type]
        raise OSError("damaged")
    assert re.search(r" 25%\|.*1\.00k/4\.00k", screen.getvalue().split("\r")[-1])


def test_nothing_is_printed_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_bar("m.gguf", Progress()):  # type: ignore[arg-type]
        pass
    assert capsys.readouterr() == ("", "")
