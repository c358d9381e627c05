"""The scripts of `benches/gpu`: a dry run of each on the fake CUDA, and tests of their functions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from serving import GOLDENS, environment

FOLDER = Path(__file__).parents[2] / "benches" / "gpu"
sys.path.append(str(FOLDER))

import common  # noqa: E402 -- found by the line above
import models  # noqa: E402 -- as above
import phase2_greedy as phase2  # noqa: E402 -- as above
import phase3_steps as phase3  # noqa: E402 -- as above
import phase4_workload as phase4  # noqa: E402 -- as above

# The rows that a dry run of each must measure, and those that it must skip.
DRY = {
    "phase2_greedy": ({"tiny, random"}, {"SmolLM2, 8 layers"}),
    "phase3_steps": ({"device", "tiny, batch 1", "tiny, batch 3"}, set()),
    "phase4_workload": ({"tiny, ours", "tiny, ours, streams"}, {"tiny, transformers", "tiny, nano-vllm"}),
    "phase5_server": (
        {"one completion", "4 streams", "--cuda-sync", "--cuda-overlap"},
        {"restart after a fault"},
    ),
}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of a dry run: a tokenizer."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "qwen2-tokenizer").mkdir()
    for name in models.TOKENIZER:
        shutil.copy(GOLDENS / "qwen2-tied-bf16" / name, folder / "qwen2-tokenizer" / name)
    return folder


@pytest.mark.parametrize("script", DRY)
def test_a_dry_run_measures_our_engine_on_the_device(
    script: str, fake_cuda: dict[str, str], inputs: Path, tmp_path: Path
) -> None:
    counts = tmp_path / "counts.json"
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--dry-run", "--out", str(tmp_path)]
    command += ["--inputs", str(inputs)]

    def state() -> dict[str, Any]:
        env = environment(**fake_cuda, FAKE_CUDA_COUNTS=str(counts))
        ran = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert ran.returncode == common.DONE, ran.stdout + ran.stderr
        found: dict[str, Any] = json.loads((tmp_path / f"{script.partition('_')[0]}.json").read_text("utf-8"))
        return found

    first = state()
    measured, skipped = DRY[script]
    assert (set(first["rows"]), set(first["skipped"]), first["failed"]) == (measured, skipped, {})
    if script == "phase2_greedy":
        # The best two logits differ by 5 ulp or more (`models.TINY`), more than the roundings of two layers.
        assert first["rows"]["tiny, random"]["equal"] == "4 of 4"
    assert "Fake H100" in first["facts"]["GPU"]
    assert json.loads(counts.read_text("utf-8"))["launches"] > 0
    table = (tmp_path / f"{script.partition('_')[0]}.md").read_text("utf-8")
    assert all(row in table for row in measured | skipped)
    assert "A dry run" in table
    assert state()["rows"] == first["rows"], "measured rows are not measured again"


# --- rows and their state ---


def options(folder: Path, *more: str) -> Any:
    return common.arguments("").parse_args(["--out", str(folder), *more])


def phase(folder: Path, *more: str) -> common.Phase:
    return common.Phase(9, "A test", [common.Column("x", "x", "{:.1f}")], options(folder, *more))


def test_a_run_continues_with_the_rows_that_are_left(tmp_path: Path) -> None:
    measured: list[str] = []

    def row(name: str, result: Any, expected_s: float = 0.0) -> common.Row:
        def measure() -> dict[str, Any]:
            measured.append(name)
            if isinstance(result, Exception):
                raise result
            return {"x": result}

        return common.Row(name, measure, expected_s)

    rows = [row("good", 1.25), row("skipped", common.Skip("no peer")), row("late", 2.0, 1e6)]
    assert phase(tmp_path).run(rows) == common.ROWS_ARE_LEFT
    assert measured == ["good", "skipped"]
    table = (tmp_path / "phase9.md").read_text("utf-8")
    assert "good | 1.2" in table
    assert "skipped skipped: no peer" in table
    wrong = [row("wrong", common.Failure("off by one", x=3)), row("broken", ValueError("a defect"))]
    assert phase(tmp_path).run([*rows[:2], *wrong]) == common.FAILED
    assert measured == ["good", "skipped", "skipped", "wrong", "broken"]
    state = json.loads((tmp_path / "phase9.json").read_text("utf-8"))
    assert state["failed"] == {
        "wrong": {"reason": "off by one", "x": 3},
        "broken": {"reason": "ValueError: a defect"},
    }
    assert phase(tmp_path, "--dry-run").run(rows[:1]) == common.DONE
    assert measured[-1] == "good", "a dry run does not reuse the rows of another run"
    assert phase(tmp_path, "--dry-run", "--fresh").run(rows[:1]) == common.DONE
    assert measured[-2:] == ["good", "good"]


def test_a_row_that_ended_its_process_is_skipped(tmp_path: Path) -> None:
    def killed() -> dict[str, Any]:
        raise KeyboardInterrupt

    rows = [common.Row("endless", killed), common.Row("other", lambda: {"x": 1.0})]
    with pytest.raises(KeyboardInterrupt):
        phase(tmp_path).run(rows)
    assert phase(tmp_path).run(rows) == common.DONE
    table = (tmp_path / "phase9.md").read_text("utf-8")
    assert "skipped endless: it did not end within the budget" in table
    assert "other | 1.0" in table
    assert phase(tmp_path).run(rows) == common.DONE, "it is still skipped"


# --- phase 2 ---


def test_a_difference_is_accepted_only_at_a_near_tie() -> None:
    """The bf16 reference is off by 0.02 at most, so another engine of its accuracy can be 0.04 apart."""
    exact = np.array([4.0, 3.97, 3.5, -1.0], np.float32)
    rounded = exact + np.array([0.01, 0.0, -0.02, 0.015], np.float32)
    assert phase2.gap_of(0, rounded, exact) == 0.0
    assert phase2.gap_of(1, rounded, exact) == pytest.approx(1.5, rel=1e-3)
    assert phase2.gap_of(2, rounded, exact) == pytest.approx(25, rel=1e-3)
    assert phase2.gap_of(1, rounded, exact) < phase2.ACCEPTED_GAP < phase2.gap_of(2, rounded, exact)
    assert phase2.first_difference([0, 0, 3], [0, 0, 3]) is None
    assert phase2.first_difference([0, 0, 3], [0, 1, 3]) == 1


def test_log_probabilities_are_those_of_the_next_token() -> None:
    logits = np.log(np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [1.0, 1.0, 1.0]], np.float32))
    found = phase2.logprobs(logits, [0, 2, 1])
    assert found == pytest.approx(np.log([0.5, 0.3]), rel=1e-5)
    assert phase2.rms([found, found]) == pytest.approx(float(np.sqrt((found**2).mean())))


# --- phase 3 ---


@pytest.mark.parametrize(
    ("name", "batch", "ideal_ms"),
    [("0.5B", 1, 0.30), ("0.5B", 256, 0.78), ("1.5B", 64, 1.20), ("7B", 8, 4.29), ("7B", 256, 6.46)],
)
def test_the_roofline_has_the_expected_values(name: str, batch: int, ideal_ms: float) -> None:
    """For an H100 (3.35 TB/s, 989 TFLOP/s) at a context of 512, rounded to two decimal places."""
    bound = phase3.bound_s(models.QWEN[name], batch, 512, 3350, 989)
    assert 1e3 * bound == pytest.approx(ideal_ms, abs=0.006)


def test_overlapping_kernels_are_counted_once() -> None:
    assert phase3.busy_share([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == pytest.approx(4 / 6)


# --- phase 4 and checkpoints ---


def test_the_workload_is_nano_vllms() -> None:
    """The sums are those of the figures in its README."""
    workload = phase4.nano_vllm_workload(False)
    assert sum(map(len, workload.prompts)) == 142_827
    assert sum(workload.n_tokens) == 133_966


def test_unpacked_weights_equal_those_of_gguf() -> None:
    values = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    packed = gguf.quants.quantize(values, kind)
    assert np.array_equal(
        models.unpack(packed.tobytes()).reshape(4, 64), gguf.quants.dequantize(packed, kind)
    )


def test_bf16_is_rounded_to_the_nearest_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.5], np.float32)
    assert models.to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xC020]
