"""Fixtures of the acceptance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from golden import FOLDER, Golden, load_golden
from runner import Runner
from serving import serving


@pytest.fixture(scope="session")
def golden() -> Golden:
    return load_golden()


@pytest.fixture
def runner() -> Iterator[Runner]:
    with Runner(FOLDER, n_cells=512, n_seq_max=8, n_batch=64) as made:
        yield made
        made.context.check_integrity()


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the golden model, named `tiny`, in float32."""
    flags = ("--dtype", "float32", "--served-model-name", "tiny", "--max-num-seqs", "16")
    with serving(tmp_path_factory.mktemp("tiny"), str(FOLDER), *flags) as server:
        yield server.url
