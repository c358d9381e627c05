"""Concurrent conversations of several turns on the real model give what each gives alone."""

from __future__ import annotations

import asyncio

import pytest
from openai import AsyncOpenAI

pytestmark = [pytest.mark.stage2, pytest.mark.model]
TURNS = {
    "geography": ["What is the capital of France?", "And of Italy?", "Which of the two is larger?"],
    "numbers": ["What is two plus three?", "Add four to that.", "Is the result even?"],
    "colors": ["Name a color.", "Name another one.", "Which one is brighter?"],
    "sea": ["Write one sentence about the sea.", "Make it shorter.", "Now about a river."],
}


async def conversation(client: AsyncOpenAI, questions: list[str]) -> list[str]:
    """Return the completions of a chat that sends all messages with each turn."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        stream = await client.chat.completions.create(
            model="smollm2",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0.7,
            seed=11,
            stream=True,
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        messages.append({"role": "assistant", "content": text})
    return [m["content"] for m in messages if m["role"] == "assistant"]


async def test_conversations_do_not_mix(smollm2_server: str) -> None:
    async with AsyncOpenAI(base_url=f"{smollm2_server}/v1", api_key="EMPTY", max_retries=0) as client:
        alone = {name: await conversation(client, questions) for name, questions in TURNS.items()}
        together = await asyncio.gather(*(conversation(client, questions) for questions in TURNS.values()))
    assert dict(zip(TURNS, together, strict=True)) == alone
    assert all(answer for answers in alone.values() for answer in answers)
    assert len({answers[0] for answers in alone.values()}) == len(TURNS)
