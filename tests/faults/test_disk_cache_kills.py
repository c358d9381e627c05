"""kill -9 while prefixes are written to disk: the next start has no error, and every hit is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fakes import core, killed_writer
from fakes.disk_runner import DiskRunner
from llaisys.engine.disk_cache import block_index
from llaisys.engine.sessions import transfer

TESTS = Path(__file__).parents[1]
SEEDS = range(30)


def test_after_a_kill_the_rest_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 seeded moments: before, in or after an operation of the file system. The fake core's cells have
    their tokens, so a wrong block gives a wrong completion."""
    seeds = ",".join(map(str, SEEDS))
    program = [sys.executable, killed_writer.__file__, str(tmp_path), seeds]
    made = subprocess.run(
        program, env={"PYTHONPATH": str(TESTS)}, check=True, stdout=subprocess.PIPE, timeout=200
    )
    assert int(made.stdout) > 100, "operations to be killed at"
    monkeypatch.setattr(block_index, "BLOCK_TOKENS", killed_writer.BLOCK)
    monkeypatch.setattr(transfer, "PIECE_BYTES", 4 * core.CELL_BYTES)
    hits = []
    for folder in [tmp_path / f"{seed}" for seed in SEEDS]:
        runner = DiskRunner(
            prefix_cache_dir=folder, prefix_cache_disk_bytes=killed_writer.N_BYTES, n_cells=512
        )
        try:
            files = [path for path in folder.glob("*/*") if path.is_file()]
            assert {path.suffix for path in files} <= {".kv"}, "nothing unfinished is left"
            sizes = sum(path.stat().st_size for path in files)
            assert runner.disk._index.n_bytes == sizes <= killed_writer.N_BYTES
            for i, (salt, prompt) in enumerate(killed_writer.PROMPTS):
                name = f"{i}"
                runner.run(name, prompt, cache_salt=salt, max_tokens=4)
                assert runner.tokens[name] == core.answer(prompt, 4)
            assert len([*folder.glob("*/*.kv")]) == len(runner.disk._index), "no block was a miss"
            hits.append(runner.external[1])
        finally:
            runner.engine.close()
    assert sum(n > 0 for n in hits) > len(SEEDS) // 2
