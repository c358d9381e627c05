"""The examples of README.md, as printed, against a server of SmolLM2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serving import END_S

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
LOCAL = "http://127.0.0.1:8000"

pytestmark = pytest.mark.model


def block(language: str, holds: str) -> str:
    (found,) = [text for kind, text in BLOCKS if kind == language and holds in text]
    return found


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=END_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_curl_example_runs(smollm2_server: str) -> None:
    command = block("sh", "curl").replace(LOCAL, smollm2_server)
    response = json.loads(run(["bash", "-c", command.replace("curl", "curl -sS", 1)]))
    assert "gravity" in response["choices"][0]["message"]["content"].lower()


def test_the_openai_client_example_runs(smollm2_server: str) -> None:
    program = block("python", "OpenAI").replace(LOCAL, smollm2_server)
    assert "gravity" in run([sys.executable, "-c", program]).lower()


def test_the_offline_example_runs() -> None:
    lines = run([sys.executable, "-c", block("python", "LLM(")]).splitlines()
    assert len(lines) == 3
    assert all(" -> " in line for line in lines[:2])


def test_the_shell_example_runs() -> None:
    line = next(line for line in block("sh", "llaisys generate").splitlines() if " generate " in line)
    words = line.replace(".venv/bin/llaisys", f"{sys.executable} -m llaisys")
    assert run(["bash", "-c", words]).strip()
