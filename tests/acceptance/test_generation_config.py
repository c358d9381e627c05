"""`generation_config.json`: each id of the eos list ends a completion; sampling defaults are used or
ignored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from golden import FOLDER, Golden
from llaisys import LLM, SamplingParams
from llaisys.errors import RejectedError

pytestmark = pytest.mark.stage1


def model_with(folder: Path, **generation: Any) -> str:
    shutil.copytree(FOLDER, folder / "m")
    (folder / "m" / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return str(folder / "m")


def test_every_eos_of_the_list_ends_a_completion(tmp_path: Path, golden: Golden) -> None:
    greedy = golden.greedy[1]
    model = model_with(tmp_path, eos_token_id=[599, greedy[5]])
    with LLM(model, dtype="float32") as llm:
        (output,) = llm.generate(
            {"prompt_token_ids": golden.prompts[1]}, SamplingParams(temperature=0, max_tokens=24)
        )
    answer = output.outputs[0]
    assert answer.token_ids == greedy[: greedy.index(greedy[5]) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


@pytest.mark.parametrize(("setting", "used"), [("auto", True), ("vllm", False)])
def test_sampling_defaults_are_used_or_ignored(tmp_path: Path, setting: str, used: bool) -> None:
    model = model_with(tmp_path, eos_token_id=599, temperature=0.25, top_k=7, repetition_penalty=1.5)
    with LLM(model, generation_config=setting) as llm:
        params = llm.get_default_sampling_params()
    want = SamplingParams(temperature=0.25, top_k=7, repetition_penalty=1.5) if used else SamplingParams()
    assert params == want


def test_a_bad_default_stops_the_start_unless_ignored(tmp_path: Path) -> None:
    model = model_with(tmp_path, eos_token_id=599, temperature=-3)
    with pytest.raises(RejectedError, match="temperature"):
        LLM(model)
    LLM(model, generation_config="vllm").close()
