"""The wheel on a fake CUDA that runs the kernels' source: from Python to the driver's calls.

These tests do not show that a GPU computes the same as the emulator, or how fast (`docs/deployment/gpu.md`).
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from serving import COMMAND, GOLDENS, environment, serving

# Head width 64, f16: the only fixture whose head width the kernels support. In its first six tokens the best
# two logits differ by 0.038 of the logits' size or more, and f16 moves one by 0.003 of it
# (`parity/decoder.rs`).
MODEL = GOLDENS / "qwen2-f16"
N_TOKENS = 6
GREEDY = {"temperature": 0.0, "max_tokens": N_TOKENS, "ignore_eos": True}
SMALL = {"num_kv_cells": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32}


Generate = Callable[..., Any]


def golden() -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and the first tokens of their greedy completions, by transformers in float32."""
    data = np.load(MODEL / "golden.npz")
    prompts = [data[f"prompt_{i}"].tolist() for i in range(3)]
    return prompts, [data[f"greedy_{i}"][:N_TOKENS].tolist() for i in range(3)]


def order(**settings: Any) -> dict[str, Any]:
    return {"model": str(MODEL), "settings": {**SMALL, **settings}, "prompts": golden()[0], "params": GREEDY}


def test_doctor_names_the_gpu(fake_cuda: dict[str, str]) -> None:
    ran = subprocess.run(
        [*COMMAND, "doctor"], capture_output=True, text=True, env=environment(**fake_cuda), check=False
    )
    (line,) = (line for line in ran.stdout.splitlines() if re.match(r"\S+\s+cuda ", line))
    for part in (
        "ok",
        "Fake H100 (compute capability 9.0, 0.2 GiB)",
        "CUDA 13.0",
        fake_cuda["LD_LIBRARY_PATH"],
    ):
        assert part in line


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_greedy_tokens_are_those_of_the_reference(generate: Generate, device: str, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    report = generate(order(device=device), FAKE_CUDA_COUNTS=str(counts))
    assert report["errors"] == []
    assert report["token_ids"] == golden()[1]
    done = json.loads(counts.read_text("utf-8"))
    assert all(done[what] > 0 for what in ("launches", "products", "graphs", "replays")), done


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        ({"num_kv_cells": 10_000_000}, r"4\.77 GiB are needed, 0\.\d+ of 0\.25 GiB are free"),
        ({"num_kv_cells": None}, r"\d+ cells of 512 bytes are needed, 0 fit: of 256 MiB a share of 0\.9"),
    ],
)
def test_an_allocation_that_does_not_fit_is_an_error_with_numbers(
    generate: Generate, cells: dict[str, Any], numbers: str
) -> None:
    ((_, text),) = generate(order(device="cuda", **cells))["errors"]
    assert re.search(numbers, text), text
    assert "gpu_memory_utilization" in text


@pytest.fixture
def two_heads(tmp_path: Path) -> Path:
    """The model with its KV head twice, one for each query head, so that two GPUs can split it."""
    folder = tmp_path / "two-heads"
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".k_proj." in name or ".v_proj." in name]:
        tensors[name] = np.concatenate([tensors[name]] * 2)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}), "utf-8")
    return folder


def test_two_gpus_split_a_model(generate: Generate, two_heads: Path) -> None:
    split = {**order(device="cuda", tensor_parallel_size=2), "model": str(two_heads)}
    report = generate(split, FAKE_CUDA_DEVICES="2")
    assert (report["errors"], report["token_ids"]) == ([], golden()[1])
    ((kind, text),) = generate(split)["errors"]
    assert kind == "UnsupportedError"
    assert "tensor_parallel_size is 2 from GPU 0 on, but the number of GPUs is 1" in text


def test_a_fault_of_one_gpu_ends_the_engine_of_both(generate: Generate, two_heads: Path) -> None:
    """No rank waits for the lost one."""
    split = {**order(device="cuda", tensor_parallel_size=2), "model": str(two_heads)}
    ((kind, text),) = generate(split, FAKE_CUDA_DEVICES="2", FAKE_CUDA_FAULT_AT="90")["errors"]
    # The order of the ranks determines the call that faults. A rank that only lost another reports nothing.
    assert kind == "EngineDeadError"
    assert text.startswith("CUDA: "), text


def test_cells_fill_the_free_memory(generate: Generate) -> None:
    report = generate(order(device="cuda", num_kv_cells=None), FAKE_CUDA_MEMORY_MB="400")
    assert (report["errors"], report["token_ids"]) == ([], golden()[1])


def test_after_a_fault_the_process_can_use_the_cpu_and_not_the_gpu(generate: Generate) -> None:
    twice = {**order(device="cuda"), "again": {**SMALL, "device": "cuda"}}
    (fault, refused) = generate(twice, FAKE_CUDA_FAULT_AT="60")["errors"]
    assert fault[0] == "EngineDeadError"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in fault[1]
    assert "restart" in refused[1], refused
    report = generate({**twice, "again": {**SMALL, "device": "cpu"}}, FAKE_CUDA_FAULT_AT="60")
    assert [kind for kind, _ in report["errors"]] == ["EngineDeadError"]
    assert report["token_ids"] == golden()[1]


COMPLETION = {"model": "qwen2-f16", "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}
FLAGS = ("--device", "cuda", "--num-kv-cells", "256", "--max-num-batched-tokens", "32", "--max-num-seqs", "4")


def test_a_server_completes_streams_and_stops(fake_cuda: dict[str, str], tmp_path: Path) -> None:
    body = {**COMPLETION, "prompt": golden()[0][1]}
    with serving(tmp_path, str(MODEL), *FLAGS, extra=fake_cuda) as server:
        whole = server.http.post("/v1/completions", json=body).json()
        assert whole["usage"]["completion_tokens"] == N_TOKENS
        with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events[-1] == "[DONE]"
        parts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert "".join(parts) == whole["choices"][0]["text"]
        assert "Fake H100" in server.log.read_text("utf-8")
        assert server.stop(signal.SIGTERM) == 0


def test_an_engine_process_restarts_after_a_fault(
    generate: Generate, fake_cuda: dict[str, str], tmp_path: Path
) -> None:
    """The first request has as many launches as are counted here, so the fault is in the second."""
    counts, prompt = tmp_path / "counts.json", golden()[0][0]
    generate({**order(device="cuda"), "prompts": [prompt]}, FAKE_CUDA_COUNTS=str(counts))
    fault_at = json.loads(counts.read_text("utf-8"))["launches"] + 20
    extra = {**fake_cuda, "FAKE_CUDA_FAULT_AT": str(fault_at)}
    body = {**COMPLETION, "prompt": prompt}
    with serving(tmp_path, str(MODEL), *FLAGS, "--engine-process", extra=extra) as server:
        first = server.http.post("/v1/completions", json=body)
        assert first.status_code == 200, first.text
        lost = server.http.post("/v1/completions", json=body)
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "engine_dead")
        # The engine process writes the log, maybe after the server has responded.
        server.wait_logged("CUDA_ERROR_ILLEGAL_ADDRESS (700)")
        while (again := server.http.post("/v1/completions", json=body)).status_code == 503:
            assert server.process.poll() is None
        assert again.json()["choices"] == first.json()["choices"]
