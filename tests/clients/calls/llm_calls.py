"""Calls of the command line tool llm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from call_list import FOLDER, KEY, LIGHT, MODEL, QUESTION, URL, call


def llm(*words: str, said: str | None = None) -> str:
    """Run the command line tool with this server in its list of models."""
    entry = f"- model_id: here\n  model_name: {MODEL}\n  api_base: {URL}\n  api_key_name: here\n"
    entry += "  supports_schema: true\n"
    (FOLDER / "extra-openai-models.yaml").write_text(entry, "utf-8")
    (FOLDER / "keys.json").write_text(json.dumps({"here": KEY}), "utf-8")
    env = {**os.environ, "LLM_USER_PATH": str(FOLDER)}
    command = [str(Path(sys.executable).with_name("llm")), *words]
    done = subprocess.run(command, env=env, input=said, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@call("llm", "llm -m MODEL PROMPT (a stream)")
def _() -> None:
    assert "Paris" in llm("-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "48", QUESTION)


@call("llm", "llm --no-stream -s SYSTEM, prompt from stdin")
def _() -> None:
    words = ("-m", "here", "--no-stream", "-s", "You are brief.", "-o", "temperature", "0")
    assert "Paris" in llm(*words, "-o", "max_tokens", "48", said=QUESTION)


@call("llm", "llm --schema")
def _() -> None:
    words = ("-m", "here", "--no-stream", "--schema", json.dumps(LIGHT), "-o", "max_tokens", "48")
    assert json.loads(llm(*words, "Turn the light on."))["on"] in (True, False)


@call("llm", "llm -c (goes on with the last chat)")
def _() -> None:
    assert llm("-c", "-o", "max_tokens", "16", "And of Italy?").strip()
