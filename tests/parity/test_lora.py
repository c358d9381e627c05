"""LoRA adapters in the core: the outputs of PEFT, and the same bits whatever shares the batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from llaisys._core import available_isas
from llaisys.errors import ExhaustedError, RejectedError, UnsupportedError
from parity.checkpoints import read_model, read_weights
from parity.families import FAMILIES
from parity.gguf_model import gguf_tensors, write_gguf
from runner import HIDDEN, LOGITS, Runner

DATA = Path(__file__).parents[1] / "data"
BASES = {"qwen2": DATA / "goldens" / "qwen2-tied-bf16", "llama": DATA / "goldens" / "llama-untied-bf16"}
LORAS = DATA / "loras"
NAMES = ["lora_llama_r16", "lora_llama_r4", "lora_qwen2_r16", "lora_qwen2_r4"]
QWEN2 = ["lora_qwen2_r4", "lora_qwen2_r16"]
N_GREEDY = 24


def base_of(name: str) -> Path:
    return BASES[name.split("_")[1]]


class LoraRunner(Runner):
    """A context with some adapters."""

    def __init__(self, path: Path, names: Sequence[str], **settings: Any) -> None:
        super().__init__(path, **{"max_loras": 4, **settings})
        # The name of a golden, or the path of another adapter.
        self.slots = {name: self.context.lora_load(str(LORAS / name))[0] for name in names}

    def acquire(self, name: str | None) -> int:
        seq = self.context.seq_acquire()
        if name is not None:
            self.context.seq_set_lora(seq, self.slots[name])
        return seq

    def outputs(self, name: str | None, tokens: Sequence[int], chunk: int = 512) -> NDArray[np.float32]:
        """Return the logits `[T, vocab]` of a prompt that is computed in chunks."""
        seq = self.acquire(name)
        parts = []
        for start in range(0, len(tokens), chunk):
            parts.append(self.extend(seq, tokens[start : start + chunk], start).logits)
        self.context.seq_release(seq)
        return np.concatenate([part for part in parts if part is not None])

    def continuation(self, name: str | None, prompt: Sequence[int], n_tokens: int) -> list[int]:
        seq = self.acquire(name)
        ids = [int(self.extend(seq, prompt, 0).token_ids[-1])]
        while len(ids) < n_tokens:
            ids.append(int(self.extend(seq, ids[-1:], len(prompt) + len(ids) - 1).token_ids[0]))
        self.context.seq_release(seq)
        return ids


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_gives_the_outputs_of_peft(name: str, isa: str) -> None:
    golden = np.load(LORAS / name / "golden.npz")
    tolerance = max(20 * float(golden["noise"]), 1e-4)
    with LoraRunner(base_of(name), [name], isa=isa) as runner:
        for i in range(3):
            prompt, rows = golden[f"prompt_{i}"].tolist(), golden[f"rows_{i}"]
            logits = runner.outputs(name, prompt)
            assert np.abs(logits[rows] - golden[f"logits_{i}"]).max() <= tolerance
            assert runner.continuation(name, prompt, N_GREEDY) == golden[f"greedy_{i}"].tolist()
            assert runner.continuation(None, prompt, N_GREEDY) == golden[f"base_greedy_{i}"].tolist()


def test_an_adapter_of_a_folder_applies_to_a_file_with_other_row_orders(tmp_path: Path) -> None:
    """A GGUF file of Llama has the rows of queries and keys interleaved."""
    name = "lora_llama_r16"
    golden = np.load(LORAS / name / "golden.npz")
    path = write_gguf(tmp_path / "model.gguf", *read_model(base_of(name)))
    prompt = golden["prompt_2"].tolist()
    with LoraRunner(path, [name]) as file, LoraRunner(base_of(name), [name]) as folder:
        assert np.array_equal(file.outputs(name, prompt), folder.outputs(name, prompt))


def write_gguf_adapter(path: Path, name: str, *, a_type: gguf.GGMLQuantizationType | None = None) -> str:
    """Write the adapter of a golden as llama.cpp's converter does, each A of whole blocks as `a_type`."""
    family, shape, _ = read_model(base_of(name))
    matrices = read_weights(LORAS / name / "adapter_model.safetensors")
    a, b = (
        {
            key.removeprefix("base_model.model.").replace(end, ".weight"): value
            for key, value in sorted(matrices.items())
            if key.endswith(end)
        }
        for end in (".lora_A.weight", ".lora_B.weight")
    )
    writer = gguf.GGUFWriter(path, str(FAMILIES[family].gguf))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    config = json.loads((LORAS / name / "adapter_config.json").read_text(encoding="utf-8"))
    writer.add_float32("adapter.lora.alpha", config["lora_alpha"])
    # As the weights of the model: rows of B move with those of queries and keys.
    stored = {key: rows for key, rows in gguf_tensors(family, shape, b).items() if key.startswith("blk.")}
    for (key, rows), columns in zip(stored.items(), a.values(), strict=True):
        if a_type is None or columns.shape[1] % 32:
            writer.add_tensor(f"{key}.lora_a", columns)
        else:
            writer.add_tensor(f"{key}.lora_a", gguf.quants.quantize(columns, a_type), raw_dtype=a_type)
        writer.add_tensor(f"{key}.lora_b", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize("name", ["lora_llama_r16", "lora_qwen2_r4"])
def test_an_adapter_in_a_gguf_file_has_the_bits_of_its_folder(name: str, tmp_path: Path) -> None:
    """On a folder, and on a GGUF file, which may have the rows of queries and keys in another order."""
    adapter = write_gguf_adapter(tmp_path / "adapter.gguf", name)
    prompt = np.load(LORAS / name / "golden.npz")["prompt_2"].tolist()
    for base in (base_of(name), write_gguf(tmp_path / "model.gguf", *read_model(base_of(name)))):
        with LoraRunner(base, [name, adapter]) as runner:
            want = runner.outputs(name, prompt)
            assert np.array_equal(runner.outputs(adapter, prompt), want)
            assert not np.array_equal(runner.outputs(None, prompt), want)


def test_an_adapter_in_a_gguf_file_may_be_quantized(tmp_path: Path) -> None:
    name, kind = "lora_qwen2_r16", gguf.GGMLQuantizationType.Q8_0
    packed = write_gguf_adapter(tmp_path / "q8_0.gguf", name, a_type=kind)
    folder = tmp_path / "rounded"
    folder.mkdir()
    matrices = read_weights(LORAS / name / "adapter_model.safetensors")
    for key, value in matrices.items():
        if key.endswith(".lora_A.weight") and value.shape[1] % 32 == 0:
            matrices[key] = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    save_file(matrices, folder / "adapter_model.safetensors")
    shutil.copy(LORAS / name / "adapter_config.json", folder)
    with LoraRunner(BASES["qwen2"], [packed, str(folder)]) as runner:
        assert np.array_equal(runner.outputs(packed, [5, 6, 7]), runner.outputs(str(folder), [5, 6, 7]))


@pytest.mark.parametrize("dtype", ["float32", "auto", "int8", "int4"])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_two_adapters_and_the_base_in_one_batch_have_the_bits_of_each_alone(
    dtype: str, n_threads: int
) -> None:
    rng = np.random.default_rng(11)
    names = [*QWEN2, None, QWEN2[0], None, QWEN2[1]]
    prompts = [rng.integers(0, 600, size=n).tolist() for n in (5, 33, 18, 1, 40, 9)]
    with LoraRunner(BASES["qwen2"], QWEN2, dtype=dtype, n_threads=n_threads, n_batch=24) as runner:
        alone = [runner.outputs(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
        # Whatever the chunks.
        for chunk in (1, 7):
            again = [runner.outputs(name, prompt, chunk) for name, prompt in zip(names, prompts, strict=True)]
            assert all(np.array_equal(a, b) for a, b in zip(alone, again, strict=True))
        seqs = [runner.acquire(name) for name in names]
        places = [(i, t) for i, prompt in enumerate(prompts) for t in range(len(prompt))]
        # Interleaved, in the order of positions.
        places.sort(key=lambda place: (place[1], place[0] * 7 % 6))
        rows = [(prompts[i][t], t, [seqs[i]], LOGITS) for i, t in places]
        together = runner.decode(rows, return_logits=True).logits
        assert together is not None
        for row, (i, t) in zip(together, places, strict=True):
            assert np.array_equal(row, alone[i][t])
        # An adapter changes the outputs.
        tokens = prompts[0]
        base = runner.outputs(None, tokens)
        assert all(np.abs(runner.outputs(name, tokens) - base).max() > 1e-2 for name in QWEN2)


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_an_adapter_on_packed_weights_is_close_to_the_same_weights_in_float32(dtype: str) -> None:
    """What the adapter adds does not depend on how the base is stored, beyond the rounding of activations."""
    name = QWEN2[0]
    tokens = np.random.default_rng(3).integers(0, 600, size=40).tolist()
    with (
        LoraRunner(BASES["qwen2"], [name]) as exact,
        LoraRunner(BASES["qwen2"], [name], dtype=dtype) as packed,
    ):
        base = np.abs(packed.outputs(None, tokens) - exact.outputs(None, tokens)).mean()
        adapted = np.abs(packed.outputs(name, tokens) - exact.outputs(name, tokens)).mean()
        # The adapter changes the logits by far more than that.
        moved = np.abs(exact.outputs(name, tokens) - exact.outputs(None, tokens)).mean()
    assert adapted < 2 * base
    assert moved > 2 * adapted or dtype == "int4"


def test_hidden_states_use_the_adapter_too() -> None:
    with LoraRunner(BASES["qwen2"], QWEN2) as runner:
        hidden = []
        for name in (None, *QWEN2):
            out = runner.extend(runner.acquire(name), [5, 6, 7], 0, HIDDEN)
            assert out.hidden is not None
            hidden.append(out.hidden)
    assert not np.array_equal(hidden[0], hidden[1])
    assert not np.array_equal(hidden[1], hidden[2])


def test_drafts_are_verified_with_the_adapter() -> None:
    name, prompt = QWEN2[1], [3, 1, 4, 1, 5]
    with LoraRunner(BASES["qwen2"], [name]) as runner:
        want = runner.continuation(name, prompt, 6)
        seq = runner.acquire(name)
        runner.extend(seq, prompt, 0)
        drafts = [*want[1:4], (want[4] + 1) % 600]
        n = len(prompt)
        rows = [(want[0], n, [seq], LOGITS)]
        rows += [(token, n + 1 + i, [seq], LOGITS | 4) for i, token in enumerate(drafts)]
        assert runner.decode(rows).token_ids.tolist() == [*want[1:5], -1]


def test_sequences_with_different_adapters_share_no_cells() -> None:
    with LoraRunner(BASES["qwen2"], QWEN2) as runner:
        core = runner.context
        first, second, base = (runner.acquire(name) for name in (*QWEN2, None))
        runner.extend(first, [1, 2, 3], 0)
        before = core.digest()
        for other in (second, base):
            with pytest.raises(RejectedError, match="different LoRA adapters and cannot share cells"):
                core.kv_seq_cp(first, other, 0, -1)
            with pytest.raises(RejectedError, match="different LoRA adapters"):
                runner.decode([(1, 0, [second, base], LOGITS)])
        with pytest.raises(
            RejectedError, match="has cells already; set its LoRA adapter before its first row"
        ):
            core.seq_set_lora(first, runner.slots[QWEN2[1]])
        assert core.digest() == before
        # A fork with the same adapter continues with the same bits.
        fork = runner.acquire(QWEN2[0])
        core.kv_seq_cp(first, fork, 0, -1)
        ours, theirs = (runner.extend(seq, [9], 3).logits for seq in (first, fork))
        assert np.array_equal(ours, theirs)


def test_slots() -> None:
    with LoraRunner(BASES["qwen2"], [], max_loras=2) as runner:
        core = runner.context
        slot, digest, rank, n_bytes = core.lora_load(str(LORAS / QWEN2[0]))
        assert (slot, rank, len(digest)) == (0, 4, 32)
        assert n_bytes > 0
        other, *_ = core.lora_load(str(LORAS / QWEN2[1]))
        with pytest.raises(ExhaustedError, match="all 2 slots of LoRA adapters are in use"):
            core.lora_load(str(LORAS / QWEN2[1]))
        seq = core.seq_acquire()
        core.seq_set_lora(seq, other)
        with pytest.raises(RejectedError, match="used by 1 sequences"):
            core.lora_unload(other)
        core.seq_release(seq)
        core.lora_unload(other)
        for call in (lambda: core.lora_unload(other), lambda: core.seq_set_lora(core.seq_acquire(), other)):
            with pytest.raises(RejectedError, match="no LoRA adapter in slot 1"):
                call()
        # The same files have the same hash, in any slot.
        core.lora_unload(slot)
        assert core.lora_load(str(LORAS / QWEN2[1]))[1] != digest
        assert core.lora_load(str(LORAS / QWEN2[0]))[1] == digest


def test_what_cannot_have_adapters_is_refused_by_name() -> None:
    with Runner(BASES["qwen2"]) as runner, pytest.raises(UnsupportedError, match="max_loras"):
        runner.context.lora_load(str(LORAS / QWEN2[0]))
    with pytest.raises(UnsupportedError, match=r"enable_lora .*tensor_parallel_size 2"):
        LoraRunner(BASES["qwen2"], [], n_ranks=2)
    with pytest.raises(RejectedError, match="max_lora_rank is 600, allowed are 1 to 512"):
        LoraRunner(BASES["qwen2"], [], max_lora_rank=600)
    with pytest.raises(RejectedError, match="has rank 16, max_lora_rank is 8; raise max_lora_rank"):
        LoraRunner(BASES["qwen2"], QWEN2[1:], max_lora_rank=8)
    # An adapter of another model.
    with pytest.raises(RejectedError, match=r"has shape .*, the configuration requires"):
        LoraRunner(DATA / "goldens" / "qwen2-odd-f32-sharded", QWEN2[:1])
