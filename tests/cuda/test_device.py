"""The wheel as it is, on a fake CUDA that runs the kernels' own text: from Python to the driver's calls.

What is not proved: that a GPU does what the emulator does, and how fast (`docs/gpu.md`)."""

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

# Head width 64, f16: the only golden whose heads the kernels know. In its first six tokens the best two
# logits are 0.038 of the logits' size apart or more, and f16 moves one by 0.003 of it (`parity/decoder.rs`).
MODEL = GOLDENS / "qwen2-f16"
N_TOKENS = 6
GREEDY = {"temperature": 0.0, "max_tokens": N_TOKENS, "ignore_eos": True}
SMALL = {"num_kv_cells": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32}


Ask = Callable[..., Any]


def golden() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and the beginnings of their greedy answers, by transformers in float32."""
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
def test_greedy_tokens_are_the_references(ask: Ask, device: str, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    said = ask(order(device=device), FAKE_CUDA_COUNTS=str(counts))
    assert said["errors"] == []
    assert said["token_ids"] == golden()[1]
    done = json.loads(counts.read_text("utf-8"))
    assert all(done[what] > 0 for what in ("launches", "products", "graphs", "replays")), done


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        ({"num_kv_cells": 10_000_000}, r"4\.77 GiB are wanted, 0\.\d+ of 0\.25 GiB are free"),
        ({"num_kv_cells": None}, r"\d+ cells of 512 bytes are needed, 0 fit: of 256 MiB a share of 0\.9"),
    ],
)
def test_what_does_not_fit_is_said_in_numbers(ask: Ask, cells: dict[str, Any], numbers: str) -> None:
    ((_, text),) = ask(order(device="cuda", **cells))["errors"]
    assert re.search(numbers, text), text
    assert "gpu_memory_utilization" in text


@pytest.fixture
def two_heads(tmp_path: Path) -> Path:
    """The model with its key-value head twice, one for each of its query heads: the same function, in a form
    that two GPUs can share."""
    folder = tmp_path / "two-heads"
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".k_proj." in name or ".v_proj." in name]:
        tensors[name] = np.concatenate([tensors[name]] * 2)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}), "utf-8")
    return folder


def test_two_gpus_share_a_model(ask: Ask, two_heads: Path) -> None:
    asked = {**order(device="cuda", tensor_parallel_size=2), "model": str(two_heads)}
    said = ask(asked, FAKE_CUDA_DEVICES="2")
    assert (said["errors"], said["token_ids"]) == ([], golden()[1])
    ((kind, text),) = ask(asked)["errors"]
    assert kind == "UnsupportedError"
    assert "tensor_parallel_size is 2 from GPU 0 on, but the number of GPUs is 1" in text


def test_a_fault_of_one_gpu_ends_the_engine_of_both(ask: Ask, two_heads: Path) -> None:
    """No rank waits for the one that is lost."""
    asked = {**order(device="cuda", tensor_parallel_size=2), "model": str(two_heads)}
    ((kind, text),) = ask(asked, FAKE_CUDA_DEVICES="2", FAKE_CUDA_FAULT_AT="90")["errors"]
    # Which call meets the fault is a matter of the ranks' order; a rank that only lost another says nothing.
    assert kind == "EngineDeadError"
    assert text.startswith("CUDA: "), text


def test_cells_fill_the_memory_that_is_left(ask: Ask) -> None:
    said = ask(order(device="cuda", num_kv_cells=None), FAKE_CUDA_MEMORY_MB="400")
    assert (said["errors"], said["token_ids"]) == ([], golden()[1])


def test_after_a_fault_the_gpu_is_lost_to_the_process_and_the_cpu_is_not(ask: Ask) -> None:
    asked = {**order(device="cuda"), "again": {**SMALL, "device": "cuda"}}
    (fault, refused) = ask(asked, FAKE_CUDA_FAULT_AT="60")["errors"]
    assert fault[0] == "EngineDeadError"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in fault[1]
    assert "restart" in refused[1], refused
    said = ask({**asked, "again": {**SMALL, "device": "cpu"}}, FAKE_CUDA_FAULT_AT="60")
    assert [kind for kind, _ in said["errors"]] == ["EngineDeadError"]
    assert said["token_ids"] == golden()[1]


COMPLETION = {"model": "qwen2-f16", "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}
FLAGS = ("--device", "cuda", "--num-kv-cells", "256", "--max-num-batched-tokens", "32", "--max-num-seqs", "4")


def test_a_server_answers_streams_and_ends(fake_cuda: dict[str, str], tmp_path: Path) -> None:
    body = {**COMPLETION, "prompt": golden()[0][1]}
    with serving(tmp_path, str(MODEL), *FLAGS, extra=fake_cuda) as server:
        whole = server.http.post("/v1/completions", json=body).json()
        assert whole["usage"]["completion_tokens"] == N_TOKENS
        with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events[-1] == "[DONE]"
        parts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert "".join(parts) == whole["choices"][0]["text"]
        assert "Fake H100" in server.log.read_text("utf-8")
        assert server.stop(signal.SIGTERM) == 0


def test_an_engine_process_comes_again_after_a_fault(
    ask: Ask, fake_cuda: dict[str, str], tmp_path: Path
) -> None:
    """The first request is as long as what is counted here, so the second meets the fault."""
    counts, prompt = tmp_path / "counts.json", golden()[0][0]
    ask({**order(device="cuda"), "prompts": [prompt]}, FAKE_CUDA_COUNTS=str(counts))
    fault_at = json.loads(counts.read_text("utf-8"))["launches"] + 20
    extra = {**fake_cuda, "FAKE_CUDA_FAULT_AT": str(fault_at)}
    body = {**COMPLETION, "prompt": prompt}
    with serving(tmp_path, str(MODEL), *FLAGS, "--engine-process", extra=extra) as server:
        first = server.http.post("/v1/completions", json=body)
        assert first.status_code == 200, first.text
        lost = server.http.post("/v1/completions", json=body)
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "engine_dead")
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in server.log.read_text("utf-8")
        while (again := server.http.post("/v1/completions", json=body)).status_code == 503:
            assert server.process.poll() is None
        assert again.json()["choices"] == first.json()["choices"]
