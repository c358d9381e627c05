"""Small requests for large responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attack.target import Group, Reply, Target

GROUP = Group("responses")
COMPLETIONS = "/v1/completions"


def _post(
    name: str, body: dict[str, Any], *allowed: int | None, path: str = COMPLETIONS, is_long: bool = False
) -> None:
    GROUP.one(name, lambda target: target.post(path, body), *allowed, is_long=is_long)


TEXT = "word " * 60
_post(
    "80_prompts_8_choices_echo_20_logprobs",
    {"prompt": [[1] * 400] * 80, "n": 8, "echo": True, "logprobs": 20, "max_tokens": 1},
    400,
    429,
)
_post(
    "128_prompts_8_choices_20_logprobs",
    {"prompt": [[1, 2]] * 128, "n": 8, "logprobs": 20, "max_tokens": 10, "ignore_eos": True},
    200,
    400,
    429,
    is_long=True,
)
_post(
    "prompt_logprobs_of_a_long_prompt",
    {"prompt": [3] * 400, "prompt_logprobs": 20, "max_tokens": 1},
    200,
    400,
)
_post("echo_of_128_prompts", {"prompt": [TEXT] * 128, "echo": True, "max_tokens": 1}, 200, 400, 429)
_post(
    "token_ids_of_128_prompts",
    {"prompt": [[5] * 60] * 128, "return_token_ids": True, "max_tokens": 1},
    200,
    400,
    429,
)
_post("2048_embeddings", {"input": ["a"] * 2048}, 200, 400, 404, 429, path="/v1/embeddings")
_post(
    "chat_with_20_logprobs_and_8_choices",
    {
        "messages": [{"role": "user", "content": "hi"}],
        "n": 8,
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 60,
        "ignore_eos": True,
    },
    200,
    400,
    429,
    path="/v1/chat/completions",
)


@GROUP.case(200, 400, 429)
def streams_with_20_logprobs(target: Target) -> Iterator[Reply]:
    body = {"prompt": "a", "n": 8, "logprobs": 20, "max_tokens": 100, "ignore_eos": True, "stream": True}
    yield target.post(COMPLETIONS, body)
