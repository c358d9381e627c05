"""Measure LoRA adapters: 16 streams with four different adapters of rank 16, compared with none.

    python benches/lora.py [--rounds 7] [--model smollm2] [--streams 16] [--adapters 4] [--rank 16]

Each line of `benches/results/lora.jsonl` is one round of one engine: seconds to decode all streams without
adapters and with them, in turns. The prompts are in the prefix cache, so the seconds are those of decoding.
`ratio` is the seconds with divided by those without; the goal is at most 1.15. The adapters have random
numbers in bf16, in all seven projections of each layer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llaisys import LLM, LoRARequest, SamplingParams
from llaisys.model_info import ModelInfo
from peers import cpu_name

RESULTS = Path(__file__).parent / "results" / "lora.jsonl"
N_PROMPT = 16


def write_adapter(folder: Path, info: ModelInfo, rank: int, seed: int) -> None:
    """Write a random adapter for a model with separate projections, in PEFT's format."""
    rng = np.random.default_rng(seed)
    q, kv, d, d_ff = info.n_heads * info.d_head, info.n_kv_heads * info.d_head, info.d_model, info.d_ff
    attention = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"mlp.gate_proj": (d_ff, d), "mlp.up_proj": (d_ff, d), "mlp.down_proj": (d, d_ff)}
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0
    for layer in range(info.n_layers):
        for name, (n_out, n_in) in shapes.items():
            for matrix, shape in (("A", (rank, n_in)), ("B", (n_out, rank))):
                values = (0.01 * rng.standard_normal(shape)).astype(np.float32)
                parts.append((values.view(np.uint32) >> 16).astype("<u2").tobytes())
                begin, end = end, end + len(parts[-1])
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{matrix}.weight"
                header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head + b"".join(parts)
    )
    targets = [name.split(".")[1] for name in shapes]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one pair per round."""
    n, rng = arguments.streams, random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    settings = {"quantization": arguments.quantization} if arguments.quantization else {}
    with LLM(
        arguments.model,
        device="cpu",
        speculative_config=None,
        enable_lora=True,
        max_loras=arguments.adapters,
        max_lora_rank=arguments.rank,
        max_num_seqs=n,
        num_kv_cells=n * (N_PROMPT + arguments.tokens) * (arguments.adapters + 2),
        max_model_len=N_PROMPT + arguments.tokens,
        **settings,
    ) as llm:
        info = llm.model_info
        vocab_size = min(info.vocab_size, 40_000)
        prompts = [
            {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(N_PROMPT)]} for _ in range(n)
        ]
        loras = []
        for number in range(arguments.adapters):
            path = folder / f"{number}"
            write_adapter(path, info, arguments.rank, number)
            loras.append(LoRARequest(f"lora-{number}", number + 1, str(path)))
        adapted = [loras[i % len(loras)] for i in range(n)]

        def seconds(requests: Sequence[LoRARequest | None]) -> float:
            begin_s = time.perf_counter()
            llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
            return time.perf_counter() - begin_s

        bare: list[LoRARequest | None] = [None] * n
        seconds(bare), seconds(adapted)
        for round_ in range(arguments.rounds):
            # The order changes with each round, so that a drift of the machine's speed meets both.
            pair = dict.fromkeys((False, True) if round_ % 2 else (True, False), 0.0)
            for is_adapted in pair:
                pair[is_adapted] = seconds(adapted if is_adapted else bare)
            yield {
                "round": round_,
                "seconds_without": round(pair[False], 4),
                "seconds_with": round(pair[True], 4),
                "ratio": round(pair[True] / pair[False], 4),
            }


def main() -> None:
    """Measure the rounds, print the median of the ratios, and append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name) for name in ("streams", "adapters", "rank", "tokens")}
    row = {"model": Path(arguments.model).name, "quantization": arguments.quantization, **given}
    row["cpu"] = cpu_name()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for made in measure(arguments, Path(folder)):
            rows.append({**row, **made})
            print(json.dumps(rows[-1]), flush=True)
    print(f"median ratio: {statistics.median(made['ratio'] for made in rows):.3f}")
    with arguments.out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(made) + "\n" for made in rows)


if __name__ == "__main__":
    main()
