"""Print tokens and logprob bits of 500 seeded requests, to compare two versions of the code.

`PYTHONPATH=TREE/python python benches/same_outputs.py [--seed 0] > FILE`, once for each tree; equal files
mean equal bits. Each line is one request: its index, a digest of prompt and parameters, a digest of the
prompt's logprobs, and for each choice its token ids and a digest of its logprobs.

Uses only exported names, so that it runs on any version. Up to 16 requests share a batch on a KV cache of
1,536 cells. So the comparison covers chunked prompts, prefix hits, preemption and several choices.
"""

import argparse
import hashlib
import json
import random
import struct
from typing import Any

from llaisys import LLM, RequestOutput, SamplingParams

N_REQUESTS = 500
# Half of the prompts begin with one of these, to use the prefix cache.
SHARED = [[random.Random(i).randrange(1000, 40000) for _ in range(90)] for i in range(6)]


def requests(seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts as token ids, and sampling parameters as keywords."""
    rng = random.Random(seed)
    made = []
    for _ in range(N_REQUESTS):
        own = [rng.randrange(1000, 40000) for _ in range(rng.choice([1, 3, 8, 20, 60, 150]))]
        prompt = rng.choice(SHARED)[: rng.randrange(1, 91)] + own if rng.random() < 0.5 else own
        greedy = rng.random() < 0.4
        params: dict[str, Any] = {
            "max_tokens": rng.randrange(1, 40),
            "ignore_eos": True,
            "temperature": 0.0 if greedy else rng.choice([0.3, 0.7, 1.0, 1.5]),
            "seed": rng.randrange(2**31),
            "logprobs": rng.choice([None, 0, 3, 20]),
        }
        if not greedy:
            params |= rng.choice([{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.8}])
        if rng.random() < 0.2:
            params |= rng.choice(
                [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}]
            )
        if rng.random() < 0.1:
            params["n"] = rng.randrange(2, 4)
        if rng.random() < 0.1:
            params["prompt_logprobs"] = 2
        made.append((prompt, params))
    return made


def digest(value: Any) -> str:
    """Return the BLAKE2b-64 digest of the JSON form."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def bits(logprobs: Any) -> str | None:
    """Return a digest of (token id, float64 bits) at each position; None without logprobs."""
    if logprobs is None:
        return None
    return digest(
        [
            None
            if at is None
            else [[token, struct.pack(">d", value.logprob).hex()] for token, value in at.items()]
            for at in logprobs
        ]
    )


def line(index: int, asked: object, output: RequestOutput) -> str:
    """Return one request and its outputs as a line of JSON."""
    completions = [
        {"tokens": list(choice.token_ids), "logprobs": bits(choice.logprobs), "finish": choice.finish_reason}
        for choice in output.outputs
    ]
    return json.dumps([index, digest(asked), bits(output.prompt_logprobs), completions])


def main() -> None:
    """Print one line for each request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    asked = requests(args.seed)
    with LLM(args.model, num_kv_cells=1536, max_num_seqs=16, max_model_len=512) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        params = [SamplingParams(**keywords) for _, keywords in asked]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for index, (request, output) in enumerate(zip(asked, outputs, strict=True)):
        print(line(index, request, output))


if __name__ == "__main__":
    main()
