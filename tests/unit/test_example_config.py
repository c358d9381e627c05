"""The example configuration holds every setting, at its default."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llaisys.config import Config, load_config

EXAMPLE = Path(__file__).parents[2] / "configs" / "example.yaml"


def test_the_example_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Config.model_fields:
        monkeypatch.delenv(f"LLAISYS_{name.upper()}", raising=False)
    assert set(yaml.safe_load(EXAMPLE.read_text("utf-8"))) == set(Config.model_fields)
    assert load_config(yaml_path=EXAMPLE) == Config()
