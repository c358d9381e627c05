"""Ends the threads of engines with grammars after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakes.engines import GRAMMAR_ENGINES


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    yield
    while GRAMMAR_ENGINES:
        GRAMMAR_ENGINES.pop().engine.close()
