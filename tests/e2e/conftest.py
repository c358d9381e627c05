"""Servers that all end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from serving import NO_SPECULATION, Server, long_model, serving


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the tiny model with a long context: one request runs, and four more may wait."""
    folder = tmp_path_factory.mktemp("tiny")
    flags = (
        "--num-kv-cells",
        "65536",
        "--max-num-seqs",
        "1",
        "--max-num-queued-reqs",
        "4",
        "--dtype",
        "float32",
        *NO_SPECULATION,
    )
    with serving(folder, str(long_model(folder)), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="EMPTY", max_retries=0) as made:
        yield made
