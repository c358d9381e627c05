"""The examples of the docs, as printed, against a server of SmolLM2; their tables match the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from serving import END_S, environment

ROOT = Path(__file__).parents[2]
LOCAL = "http://127.0.0.1:8000"
PAGES = ("quickstart.md", "api.md", "responses.md", "configuration.md", "python.md")
BLOCKS = [
    pytest.param(language, text, id=f"{page}-{index}")
    for page in PAGES
    for index, (language, text) in enumerate(
        re.findall(r"```(bash|python)\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.S)
    )
]


@pytest.mark.model
@pytest.mark.parametrize(("language", "text"), BLOCKS)
def test_an_example_runs(smollm2_server: str, language: str, text: str) -> None:
    program = text.replace(LOCAL, smollm2_server)
    if language == "bash":
        program = program.replace("llaisys config", f"{sys.executable} -m llaisys config")
        command = ["bash", "-euo", "pipefail", "-c", program]
    else:
        command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=END_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_page_has_examples() -> None:
    assert len(BLOCKS) >= 6


def test_the_tables_match_the_code() -> None:
    command = [sys.executable, "scripts/doc_tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
