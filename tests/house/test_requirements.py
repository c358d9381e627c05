"""docs/project/requirements.md names only existing files, identifiers, states and settings."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from llaisys.config import Config
from llaisys.engine import request
from llaisys.outputs import FinishReason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "project" / "requirements.md").read_text("utf-8")


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table under a heading, without its first two lines."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_name_is_defined_in_its_file() -> None:
    rows = table("Classes and functions")
    assert len(rows) > 20
    for *_, location in rows:
        found = re.fullmatch(r"`(\w+)` in `([\w/.-]+)`", location)
        assert found, location
        name, path = found.groups()
        text = (ROOT / path).read_text("utf-8")
        assert re.search(rf"\b(class|def|struct|fn) {name}\b", text), location


def test_each_state_exists() -> None:
    named = {name for _, cell, _ in table("States of a request") for name in re.findall(r"`(\w+)`", cell)}
    assert named == {"Waiting", "WaitingForRemoteKvs", "Running", "Preempted", "Finished"}
    assert all(hasattr(request, name) for name in named)
    reasons = re.findall(r"FinishReason\.(\w+)", PAGE)
    assert sorted(reasons) == sorted(FinishReason.__members__)


def test_each_setting_exists_and_has_its_design_value() -> None:
    design = yaml.safe_load((ROOT / "configs" / "concurrency-design.yaml").read_text("utf-8"))
    named = {setting.strip("`"): value for _, setting, value in table("Configuration")}
    assert named.keys() <= Config.model_fields.keys()
    assert {name: str(value) for name, value in design.items()} == {k: v for k, v in named.items() if v}
