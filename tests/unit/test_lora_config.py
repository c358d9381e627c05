"""The settings of LoRA in every source, and adapters that a server cannot load at startup."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from llaisys import AsyncLLM, Config
from llaisys.cli.config_flags import add_config_flags, config_of
from llaisys.config import LoraModule, load_config
from llaisys.errors import RejectedError

DATA = Path(__file__).parents[1] / "data"
BASE = DATA / "goldens" / "qwen2-tied-bf16"
A, B = LoraModule("a", "/x"), LoraModule("b", "/y=z", "base")
B_JSON = json.dumps({"name": "b", "path": "/y=z", "base_model_name": "base"})


def of_flags(*flags: str) -> Config:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return config_of(parser.parse_args(flags))


def test_modules_in_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As flags: several values after one flag, and repeated flags, as in vLLM."""
    for flags in (("--lora-modules", "a=/x", B_JSON), ("--lora-modules", "a=/x", "--lora-modules", B_JSON)):
        assert of_flags("--enable-lora", *flags).lora_modules == (A, B)
    file = tmp_path / "config.yaml"
    file.write_text(
        "enable_lora: true\nlora_modules: ['a=/x', {name: b, path: /y=z, base_model_name: base}]\n", "utf-8"
    )
    assert load_config({}, file).lora_modules == (A, B)
    monkeypatch.setenv("LLAISYS_ENABLE_LORA", "1")
    for text in (f"[{json.dumps({'name': 'a', 'path': '/x'})}, {B_JSON}]", "a=/x,b=/y=z"):
        monkeypatch.setenv("LLAISYS_LORA_MODULES", text)
        assert [module.name for module in load_config().lora_modules] == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora_modules": ["a=/x"], "enable_lora": False}, "needs enable_lora"),
        ({"lora_modules": ["a"]}, "expected name=path"),
        ({"lora_modules": ["=/x"]}, "at least 1 character"),
        ({"lora_modules": ["a="]}, "at least 1 character"),
        ({"lora_modules": ["{a"]}, "is not JSON"),
        ({"lora_modules": ['{"name": "a", "path": "/x", "rank": 3}']}, "rank"),
        ({"lora_modules": ["a=/x", "a=/y"]}, "two adapters named 'a'"),
        ({"lora_modules": ["a=/x", "b=/y"], "max_loras": 1}, "2 adapters, max_loras is 1"),
        (
            {"lora_modules": ["a=/x"], "models": [{"name": "m"}, {"name": "n"}]},
            "base_model_name of a is None",
        ),
        ({"max_lora_rank": 513}, "max_lora_rank"),
    ],
)
def test_invalid_modules_are_rejected(settings: dict[str, object], says: str) -> None:
    with pytest.raises(RejectedError, match=says):
        load_config({"enable_lora": True, **settings})


def test_a_module_belongs_to_one_of_several_models() -> None:
    models = [{"name": "m", "model": "x"}, {"name": "n", "model": "y", "lora_modules": ["c=/c"]}]
    module = {"name": "a", "path": "/x", "base_model_name": "m"}
    config = load_config({"enable_lora": True, "models": models, "lora_modules": [module]})
    assert [[each.name for each in own.lora_modules] for own in config.each_model()] == [["a"], ["c"]]


async def test_a_damaged_module_ends_the_start(tmp_path: Path) -> None:
    config = load_config({"model": str(BASE), "enable_lora": True, "lora_modules": [f"bad={tmp_path}"]})
    with pytest.raises(RejectedError, match=r"lora_modules: bad: .* has no adapter_config.json") as caught:
        await AsyncLLM.start(config)
    assert caught.value.param == "lora_modules"
