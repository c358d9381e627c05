"""docs/operations/security.md: each layer that rejects requests names a test that verifies it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_layer_of_security_names_its_test() -> None:
    page = (ROOT / "docs" / "operations" / "security.md").read_text("utf-8")
    section = page.split("## What each layer refuses\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 12
    for row in rows:
        tests = re.findall(r"`(tests/[\w/.]+)`", row[-1])
        assert tests, row[0]
        assert all((ROOT / test).exists() for test in tests), tests
