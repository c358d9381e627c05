"""`llaisys config show`: values, where they come from, and no secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llaisys.cli.main import main
from llaisys.config import GROUPS, SECRETS, Config

KEY = "sk-very-secret"
GROUPED = [name for names in GROUPS.values() for name in names]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a YAML file, with environment variables that override it and an API key."""
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\nmax-num-seqs: 7\nseed: 3\nhost: 127.0.0.1\n", "utf-8")
    monkeypatch.setenv("LLAISYS_PORT", "9001")
    monkeypatch.setenv("LLAISYS_SEED", "4")
    monkeypatch.setenv("LLAISYS_API_KEY", f"{KEY},other")
    return file


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["config", "show", *arguments]) == 0
    printed = capsys.readouterr().out
    assert KEY not in printed
    return printed


def test_each_source_is_shown(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = show(capsys, "--json", "some/model", "--config", str(settings), "--seed", "5")
    shown: dict[str, Any] = json.loads(printed)
    assert list(shown) == GROUPED
    assert shown["model"] == {"value": "some/model", "source": "flag"}
    assert shown["seed"] == {"value": 5, "source": "flag"}
    assert shown["port"] == {"value": 9001, "source": "environment"}
    assert shown["max_num_seqs"] == {"value": 7, "source": "file"}
    assert shown["host"] == {"value": "127.0.0.1", "source": "file"}
    assert shown["isa"] == {"value": "auto", "source": "default"}
    assert shown["api_key"] == {"value": ["***", "***"], "source": "environment"}


def test_the_table_has_every_setting_with_its_source(
    settings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line.split() for line in show(capsys, "--config", str(settings)).splitlines()]
    assert [row[0] for row in rows] == GROUPED
    assert ["port", "9001", "environment"] in rows
    assert ["max_num_seqs", "7", "file"] in rows
    assert ["session_store", "null", "default"] in rows


def test_without_a_key_nothing_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(show(capsys, "--json"))["api_key"] == {"value": [], "source": "default"}
    shown = json.loads(show(capsys, "--json", "--api-key", KEY))
    assert shown["api_key"] == {"value": ["***"], "source": "flag"}


def test_invalid_settings_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--port", "70000"]) == 1
    assert "port" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["config", "shwo"])


def test_credentials_of_a_trace_collector_are_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"https://me:{KEY}@collector.example:4318/v1/traces"
    printed = show(capsys, "--json", "--otlp-traces-endpoint", address)
    assert KEY not in printed
    assert (
        json.loads(printed)["otlp_traces_endpoint"]["value"] == "https://***@collector.example:4318/v1/traces"
    )


def test_every_setting_that_may_hold_a_secret_is_hidden_or_a_file() -> None:
    """Checks setting names: a new one must be hidden, a path, a number or a flag."""
    named = {
        name: field.annotation
        for name, field in Config.model_fields.items()
        if any(word in name for word in ("key", "token", "secret", "password", "credential", "header"))
    }
    counts = {name for name, kind in named.items() if kind in (int, int | None, bool)}
    files = {name for name, kind in named.items() if kind == Path | None}
    assert set(named) - counts - files == SECRETS
