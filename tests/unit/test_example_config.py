"""The example configuration has every setting at its default."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llaisys.config import Config, load_config

EXAMPLE = Path(__file__).parents[2] / "configs" / "example.yaml"


def test_the_example_equals_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Config.model_fields:
        monkeypatch.delenv(f"LLAISYS_{name.upper()}", raising=False)
    assert set(yaml.safe_load(EXAMPLE.read_text("utf-8"))) == set(Config.model_fields)
    assert load_config(yaml_path=EXAMPLE) == Config()


def test_the_example_of_several_models_is_valid() -> None:
    first, second = load_config(yaml_path=EXAMPLE.with_name("models.yaml")).each_model()
    assert (first.model, first.preload, first.idle_unload_s) == ("smollm2", True, 600)
    assert (second.preload, second.engine_process, second.max_num_seqs) == (False, True, 8)
