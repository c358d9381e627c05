"""Settings of Python's interpreter in processes whose delays are served or measured."""

from __future__ import annotations

import gc
import sys

import pytest

from llaisys.interpreter import GC_THRESHOLDS, SWITCH_INTERVAL_S, responsive_interpreter


def test_pauses_are_shorter_until_the_end_of_the_context() -> None:
    before = gc.get_threshold(), sys.getswitchinterval(), gc.get_freeze_count()
    with responsive_interpreter():
        assert gc.get_threshold() == GC_THRESHOLDS
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), sys.getswitchinterval(), gc.get_freeze_count()) == before
