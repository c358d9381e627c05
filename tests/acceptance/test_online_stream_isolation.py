"""Streams do not affect each other, over HTTP with the real client and with cancels in between."""

from __future__ import annotations

import asyncio
import random

import pytest
from openai import AsyncOpenAI

from golden import Golden

pytestmark = pytest.mark.stage2
N_STREAMS = 24


async def stream_text(client: AsyncOpenAI, prompt: list[int], leave_after: int | None) -> str:
    """The text of a stream, or of its first `leave_after` chunks, after which the client disconnects."""
    text, n_chunks = "", 0
    stream = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=40,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async with stream:
        async for chunk in stream:
            text += chunk.choices[0].text
            n_chunks += 1
            if n_chunks == leave_after:
                break
    return text


async def test_streams_do_not_leak_into_each_other(tiny_server: str, golden: Golden) -> None:
    seed = 20261121
    rng = random.Random(seed)
    print(f"seed {seed}")
    async with AsyncOpenAI(base_url=f"{tiny_server}/v1", api_key="EMPTY", max_retries=0) as client:
        prompts = [[*golden.prompts[2][: rng.randint(1, 40)], i] for i in range(N_STREAMS)]
        alone = [await stream_text(client, prompt, None) for prompt in prompts]
        assert len(set(alone)) > N_STREAMS // 2
        leave = [rng.randint(1, 10) if i % 3 == 0 else None for i in range(N_STREAMS)]
        together = await asyncio.gather(*map(stream_text, [client] * N_STREAMS, prompts, leave))
    for whole, got, left in zip(alone, together, leave, strict=True):
        assert whole.startswith(got) if left else whole == got
