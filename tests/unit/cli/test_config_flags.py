"""Flags generated from the configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from llaisys.cli.config_flags import (
    CLIENT_SETTINGS,
    add_config_flags,
    config_of,
    flag_of,
    integer,
    overrides_of,
)
from llaisys.config import Config, ServerConfig
from llaisys.errors import RejectedError


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return parser.parse_args(arguments)


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Config.model_fields:
        monkeypatch.delenv(f"LLAISYS_{name.upper()}", raising=False)


def test_every_field_is_a_flag_with_help() -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    text = parser.format_help()
    for name, field in Config.model_fields.items():
        assert f"{flag_of(name)} " in text.replace("\n", " ").replace(",", " ")
        assert field.description


def test_without_flags_the_defaults_apply() -> None:
    assert config_of(parse()) == Config()


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["some/model"], "model", "some/model"),
        (["--model", "some/model"], "model", "some/model"),
        (["some/model", "--model", "some/model"], "model", "some/model"),
        (["--port", "9000"], "port", 9000),
        (["--max-model-len", "2K"], "max_model_len", 2048),
        (["--max-model-len", "2k"], "max_model_len", 2000),
        (["--request-timeout-s", "1.5"], "request_timeout_s", 1.5),
        (["--strict-fields"], "strict_fields", True),
        (["--no-strict-fields"], "strict_fields", False),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--tensor-parallel-size", "4"], "tensor_parallel_size", 4),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--chat-template", "a.jinja"], "chat_template", Path("a.jinja")),
        (["--api-key", "a", "--api-key", "b,c"], "api_key", ("a", "b,c")),
    ],
)
def test_a_flag_sets_its_field(arguments: list[str], field: str, value: object) -> None:
    assert getattr(config_of(parse(*arguments)), field) == value


def test_two_model_arguments_are_rejected() -> None:
    with pytest.raises(RejectedError, match="one of them"):
        config_of(parse("some/model", "--model", "other/model"))


@pytest.mark.parametrize(
    "arguments", [["--port", "many"], ["--dtype", "float8"], ["--request-timeout-s", "x"]]
)
def test_unparsable_values_are_rejected_by_the_argument_parser(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2


def test_out_of_range_values_are_rejected_by_the_configuration() -> None:
    with pytest.raises(RejectedError, match="max_num_seqs"):
        config_of(parse("--max-num-seqs", "257"))


def test_precedence_of_flags_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nnum_threads: 3\n")
    monkeypatch.setenv("LLAISYS_MAX_NUM_SEQS", "20")
    monkeypatch.setenv("LLAISYS_PORT", "10")
    config = config_of(parse("--config", str(file), "--port", "100"))
    assert (config.port, config.max_num_seqs, config.num_threads) == (100, 20, 3)


def test_a_client_has_the_settings_of_an_engine_and_a_key() -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser, CLIENT_SETTINGS)
    given = vars(parser.parse_args(["--api-key", "k", "--max-num-seqs", "3"]))
    assert (given["api_key"], given["max_num_seqs"]) == (["k"], 3)
    assert not CLIENT_SETTINGS & (ServerConfig.model_fields.keys() - {"api_key"})
    with pytest.raises(SystemExit):
        parser.parse_args(["--port", "1"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("-7", -7), ("3k", 3000), ("3K", 3072), ("1m", 10**6), ("1M", 2**20), ("2G", 2**31)],
)
def test_integers_may_have_a_suffix(text: str, value: int) -> None:
    assert integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1kk", "0x10", "1 k"])
def test_invalid_integers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        integer(text)


def test_aliases_of_other_servers_are_accepted() -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    given = overrides_of(parser.parse_args(["--shutdown-timeout", "7", "--timeout-keep-alive", "8"]))
    assert given == {"shutdown_timeout_s": 7, "timeout_keep_alive_s": 8}
