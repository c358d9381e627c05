"""`llaisys bench` against a server and with the engine in the process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llaisys.cli.main import main
from serving import COMMAND, GOLDENS, Server, environment

MODEL = str(GOLDENS / "qwen2-tied-bf16")


def serve_bench(folder: Path, server: Server, *flags: str) -> tuple[dict[str, Any], str]:
    """Return the JSON result and the output of a run in its own process."""
    command = [*COMMAND, "bench", "serve", "--base-url", server.url, "--vocab-size", "100", "--disable-tqdm"]
    files = ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "r.json"]
    done = subprocess.run([*command, *files, *flags], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "r.json").read_text("utf-8")), done.stdout


def test_bench_serve_counts_requests_and_tokens(tiny: Server, tmp_path: Path) -> None:
    before = tiny.metric("vllm:generation_tokens_total")
    flags = ("--num-prompts", "8", "--input-len", "12", "--output-len", "9", "--max-concurrency", "4")
    picture = tmp_path / "run.svg"
    result, text = serve_bench(
        tmp_path, tiny, *flags, "--seed", "5", "--plot", str(picture), "--metadata", "a=b"
    )
    assert (result["completed"], result["failed"], result["seed"], result["a"]) == (8, 0, 5, "b")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (96, 72)
    assert tiny.metric("vllm:generation_tokens_total") - before == 72 + 9  # with the warm-up
    assert result["output_lens"] == [9] * 8
    assert result["max_concurrent_requests"] <= 4
    assert all(
        0 < ttft <= latency for ttft, latency in zip(result["ttfts"], result["latencies"], strict=True)
    )
    assert result["client"].keys() >= {"cpu_share", "loop_lag_p99_ms"}
    assert "seed 5" in text
    assert picture.read_text("utf-8").startswith("<svg")


def test_open_loop_counts_rejections_as_failed(tiny: Server, tmp_path: Path) -> None:
    """More requests arrive at once than can run and wait; rejected requests count in no throughput."""
    result, _ = serve_bench(tmp_path, tiny, "--num-prompts", "40", "--input-len", "4", "--output-len", "1000")
    assert result["completed"] + result["failed"] == 40
    assert result["failed"] >= 1
    assert result["total_output_tokens"] == 1000 * result["completed"]
    assert all(error.startswith("429: ") for error in result["failures"])


def test_conversations_hit_the_prefix_cache(smollm2: Server, tmp_path: Path) -> None:
    flags = ("--dataset-name", "chat", "--num-prompts", "6", "--chat-turns", "3", "--input-len", "8")
    result, _ = serve_bench(
        tmp_path, smollm2, *flags, "--output-len", "4", "--ignore-eos", "--max-concurrency", "2"
    )
    assert (result["completed"], result["total_output_tokens"]) == (6, 24)
    assert result["cached_input_tokens"] > 0


def test_throughput_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.json"
    flags = ("--num-prompts", "6", "--input-len", "5", "--output-len", "4", "--n", "2", "--seed", "3")
    assert main(["bench", "throughput", MODEL, *flags, "--output-json", str(out)]) == 0
    result = json.loads(out.read_text("utf-8"))
    assert (result["num_requests"], result["total_num_tokens"], result["seed"]) == (6, 6 * (5 + 2 * 4), 3)
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert "output tokens/s (seed 3)" in capsys.readouterr().out


def test_latency_without_a_server(tmp_path: Path) -> None:
    out = tmp_path / "l.json"
    flags = ("--batch-size", "2", "--input-len", "5", "--output-len", "3", "--num-iters", "4")
    assert (
        main(["bench", "latency", MODEL, *flags, "--num-iters-warmup", "1", "--output-json", str(out)]) == 0
    )
    result = json.loads(out.read_text("utf-8"))
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
