"""Fixtures of the acceptance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from golden import FOLDER, Golden, load_golden
from runner import Runner


@pytest.fixture(scope="session")
def golden() -> Golden:
    return load_golden()


@pytest.fixture
def runner() -> Iterator[Runner]:
    with Runner(FOLDER, n_cells=512, n_seq_max=8, n_batch=64) as made:
        yield made
        made.context.check_integrity()
