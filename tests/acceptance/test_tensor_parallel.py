"""A model split over ranks gives the greedy ids of transformers in any batch, also over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden import FOLDER, Golden, load_golden
from llaisys import LLM, RequestOutput, SamplingParams
from llaisys.errors import UnsupportedError
from serving import serving

# Models with two key-value heads: tied and untied output matrix, biases, head norms, multipliers.
FOLDERS = [
    "qwen2-tied-bf16",
    "llama-untied-bf16",
    "llama3-rope-bf16",
    "mistral-bf16",
    "qwen3-tied-bf16",
    "granite4_bf16",
    "hunyuan_dense_bf16",
]
SMOLLM2 = Path(__file__).parents[1] / "data" / "smollm2-135m" / "golden.json"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


def split(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", tensor_parallel_size=2, num_kv_cells=1024)


@pytest.mark.parametrize("name", FOLDERS)
def test_greedy_ids_are_transformers(name: str) -> None:
    golden = load_golden(FOLDER.parent / name)
    with split(FOLDER.parent / name) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in golden.prompts], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == golden.greedy


@pytest.mark.model
def test_a_real_model_on_three_ranks() -> None:
    """SmolLM2 has nine heads, three key-value heads, and 1,536 inner columns in blocks of 32."""
    case = json.loads(SMOLLM2.read_text("utf-8"))["cases"][0]
    params = SamplingParams(temperature=0, max_tokens=16)
    with LLM("smollm2", dtype="float32", num_kv_cells=1024, tensor_parallel_size=3) as llm:
        output = llm.chat([case["messages"]], params)[0]
    assert output.outputs[0].token_ids == case["greedy_ids"][:16]


def bits(output: RequestOutput) -> object:
    """Return what is compared: ids, and the bits of logprobs."""
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_a_batch_of_eight_gives_the_bits_of_one_alone(golden: Golden) -> None:
    prompts = [{"prompt_token_ids": (golden.prompts * 8)[i][: 3 + 2 * i]} for i in range(8)]
    with split(FOLDER) as llm:
        together = llm.generate(prompts, GREEDY)
        alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [bits(output) for output in together] == [bits(output) for output in alone]


def test_a_model_that_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"2 ranks .*key-value heads is 1, expected a multiple of 2"):
        split(FOLDER.parent / "qwen2-f16")


def test_a_server_takes_the_flag(golden: Golden, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": golden.prompts[0], "max_tokens": 24, "temperature": 0}
    flags = ("--dtype", "float32", "--served-model-name", "tiny", "-tp", "2")
    with serving(tmp_path, str(FOLDER), *flags) as server:
        answer = server.http.post(
            "/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True}
        )
        server.wait_logged("split over 2 ranks")
    assert answer.json()["choices"][0]["token_ids"] == golden.greedy[0]
