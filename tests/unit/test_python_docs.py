"""docs/guides/offline-python.md: what its tables say of vLLM's arguments is what the code does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llaisys import (
    LLM,
    AsyncLLM,
    LlaisysError,
    PoolingParams,
    RejectedError,
    SamplingParams,
    StructuredOutputsParams,
)
from llaisys.config import Config, load_config

PAGE = (Path(__file__).parents[2] / "docs" / "migration" / "vllm.md").read_text("utf-8")
TABLES = PAGE.split("<!-- arguments of vLLM -->")[1].split("<!-- end of arguments of vLLM -->")[0]
TARGETS: dict[str, Callable[..., Any]] = {
    "LLM": LLM,
    "LLM.generate": LLM.generate,
    "LLM.chat": LLM.chat,
    "LLM.embed": LLM.embed,
    "LLM.encode": LLM.encode,
    "LLM.score": LLM.score,
    "LLM.reset_prefix_cache": LLM.reset_prefix_cache,
    "SamplingParams": SamplingParams,
    "StructuredOutputsParams": StructuredOutputsParams,
    "PoolingParams": PoolingParams,
    "AsyncLLM.generate": AsyncLLM.generate,
}
# The order of vLLM's positional arguments.
POSITIONAL = {
    "LLM.generate": ["prompts", "sampling_params"],
    "LLM.chat": [
        "messages",
        "sampling_params",
        "use_tqdm",
        "lora_request",
        "chat_template",
        "chat_template_content_format",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "chat_template_kwargs",
        "tokenization_kwargs",
        "mm_processor_kwargs",
    ],
    "LLM.embed": ["prompts"],
    "LLM.encode": ["prompts", "pooling_params"],
    "LLM.score": ["data_1", "data_2"],
    "LLM.reset_prefix_cache": ["reset_running_requests", "reset_connector"],
    "AsyncLLM.generate": ["prompt", "sampling_params", "request_id"],
}


def rows() -> list[tuple[str, str, str]]:
    """Return (target, argument, what the table says) of each argument."""
    found = []
    for section in TABLES.split("### ")[1:]:
        target = section.split("`")[1]
        for line in section.splitlines():
            if line.startswith("| `"):
                arguments, says = line.strip("| ").split(" | ")
                found += [(target, name, says) for name in re.findall(r"`(\w+)`", arguments)]
    return found


def names(target: str) -> set[str]:
    known = set(inspect.signature(TARGETS[target]).parameters)
    return known | set(Config.model_fields) if target == "LLM" else known


@pytest.mark.parametrize(("target", "argument", "says"), rows())
def test_a_row_says_what_the_code_does(target: str, argument: str, says: str) -> None:
    assert says.startswith(("supported", "only None", "refused"))
    assert (argument in names(target)) == (not says.startswith("refused"))
    if not says.startswith("refused"):
        return
    if target == "LLM":
        with pytest.raises(RejectedError, match=argument):
            load_config({argument: 1})
    elif isinstance(TARGETS[target], type):
        with pytest.raises((TypeError, LlaisysError), match=argument):
            TARGETS[target](**{argument: 1})


def test_every_target_has_a_table() -> None:
    assert {target for target, _, _ in rows()} == TARGETS.keys()


@pytest.mark.parametrize("target", POSITIONAL)
def test_positional_arguments_are_in_the_order_of_vllm(target: str) -> None:
    parameters = inspect.signature(TARGETS[target]).parameters.values()
    assert [
        each.name
        for each in parameters
        if each.name != "self" and each.kind is not inspect.Parameter.KEYWORD_ONLY
    ] == POSITIONAL[target]
