"""Sources of settings, and configuration errors that stop the start."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from pydantic import ValidationError

from llaisys.cli.config_flags import add_config_flags, overrides_of
from llaisys.config import Config, KvEventsConfig, SpeculativeConfig, explain_config, load_config
from llaisys.errors import RejectedError


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "llaisys.yaml"
    path.write_text("max-num-seqs: 3\nport: 9000\napi_key: [a, b]\n")
    return path


def test_flags_override_the_environment_overrides_yaml_overrides_defaults(
    yaml_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_config().port == 8000
    assert load_config(yaml_path=yaml_file).port == 9000
    monkeypatch.setenv("LLAISYS_PORT", "9001")
    assert load_config(yaml_path=yaml_file).port == 9001
    assert load_config({"port": 9002}, yaml_file).port == 9002
    assert load_config(yaml_path=yaml_file).max_num_seqs == 3


@pytest.mark.parametrize("name", ["LLAISYS_PORT", "llaisys_port", "Llaisys_Port"])
def test_environment_variables_override_yaml_in_any_letter_case(
    name: str, yaml_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "9001")
    config, sources = explain_config(yaml_path=yaml_file)
    assert (config.port, sources["port"]) == (9001, "environment")


def test_lists_are_yaml_lists_or_separated_by_commas(
    yaml_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_config(yaml_path=yaml_file).api_key == ("a", "b")
    monkeypatch.setenv("LLAISYS_API_KEY", " c, d,")
    assert load_config().api_key == ("c", "d")


@pytest.mark.parametrize("value", ["", " ", ",", "  ,  "])
def test_an_empty_key_is_rejected_from_every_source(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--api-key "$KEY"` with an unset KEY would accept every client that sends an empty key."""
    path = tmp_path / "c.yaml"
    for text in (
        f'api_key: "{value}"',
        f'api_key: ["good", "{value}"]' if "," not in value else "api_key: ''",
    ):
        path.write_text(text)
        with pytest.raises(RejectedError, match=r"api_key.*empty.*shell variable"):
            load_config(yaml_path=path)
    if "," not in value:  # a flag may be repeated, so a comma is part of the key
        with pytest.raises(RejectedError, match=r"api_key.*empty.*shell variable"):
            load_config({"api_key": ("good", value)})
    monkeypatch.setenv("LLAISYS_API_KEY", value)
    with pytest.raises(RejectedError, match=r"api_key.*empty.*shell variable") as caught:
        load_config()
    assert caught.value.param == "api_key"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"max_num_sequences": 3}, "max_num_sequences"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"isa": "sse"}, "isa"),
    ],
)
def test_an_unknown_setting_or_an_invalid_value_is_rejected_by_name(
    given: dict[str, object], key: str
) -> None:
    with pytest.raises(RejectedError, match=key) as caught:
        load_config(given)
    assert caught.value.param == key


def test_an_invalid_environment_variable_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAISYS_MAX_NUM_SEQS", "many")
    with pytest.raises(RejectedError, match=r"max_num_seqs.*many"):
        load_config()


@pytest.mark.parametrize(("text", "says"), [("- a\n", "list"), ("a: [", "cannot read"), ("", "")])
def test_yaml_must_be_a_mapping(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    if not says:
        assert load_config(yaml_path=path) == Config()
        return
    with pytest.raises(RejectedError, match=says):
        load_config(yaml_path=path)


def test_a_missing_yaml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match=r"nothing\.yaml"):
        load_config(yaml_path=tmp_path / "nothing.yaml")


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().port = 1  # type: ignore[misc]


MODELS = """
max_num_seqs: 7
idle_unload_s: 60
models:
  - name: a
    model: some/model
    dtype: float32
  - {name: b, preload: false, max-num-seqs: 3, idle_unload_s: null}
"""


def test_each_model_has_its_own_settings_over_the_shared_ones(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MODELS)
    config = load_config({"port": 1}, path)
    a, b = config.each_model()
    assert (a.model, a.served_model_name, a.dtype, a.max_num_seqs) == ("some/model", ("a",), "float32", 7)
    assert (b.model, b.served_model_name, b.dtype, b.max_num_seqs) == ("b", ("b",), "auto", 3)
    assert (a.preload, b.preload, a.idle_unload_s, b.idle_unload_s) == (True, False, 60, None)
    assert a.models == b.models == ()


def test_without_models_the_config_is_the_only_model() -> None:
    config = Config()
    assert config.each_model() == (config,)


@pytest.mark.parametrize("given", ["[{name: a}, {name: b}]", ["{name: a}", '{"name": "b"}']])
def test_models_as_text(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.model for each in load_config({"models": given}).each_model()] == ["a", "b"]
    if isinstance(given, str):
        monkeypatch.setenv("LLAISYS_MODELS", given)
        assert [each.model for each in load_config().each_model()] == ["a", "b"]


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ([{"model": "x"}], r"models\[0\]: name is None"),
        ([{"name": "a"}, {"name": "a"}], r"models\[1\]: name is 'a', expected a unique string"),
        ([{"name": "a", "port": 3}], r"models\[0\]: port is a setting of the server"),
        ([{"name": "a", "dtype": "float8"}], r"models\[0\]\.dtype: .*float8"),
        ([{"name": "a", "max_num_sqs": 3}], r"models\[0\]\.max_num_sqs"),
        ("[{name: a}", "models: .*expected a list"),
        (3, "models: .*expected a list"),
        (["a"], "models"),
    ],
)
def test_an_invalid_model_entry_is_rejected_by_position(models: object, says: str) -> None:
    with pytest.raises(RejectedError, match=says):
        load_config({"models": models})


def test_model_and_models_exclude_each_other() -> None:
    with pytest.raises(RejectedError, match="remove model"):
        load_config({"models": [{"name": "a"}], "model": "b"})


@pytest.mark.parametrize("name", ["session_store", "prefix_cache_dir"])
def test_models_do_not_share_a_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(RejectedError, match=f"the same {name}"):
        load_config({"models": "[{name: a}, {name: b}]", name: str(tmp_path)})
    own = f"[{{name: a, {name}: {tmp_path}/a}}, {{name: b, {name}: {tmp_path}/b}}, {{name: c}}]"
    assert len(load_config({"models": own}).each_model()) == 3


SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=4)


def test_speculation_is_a_flag_an_environment_variable_and_a_yaml_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{"method": "suffix", "num_speculative_tokens": 4}'
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    arguments = parser.parse_args(["--speculative-config", text])
    assert load_config(overrides_of(arguments)).speculative_config == SUFFIX
    path = tmp_path / "config.yaml"
    path.write_text("speculative_config: {method: suffix, num_speculative_tokens: 4}")
    assert load_config(yaml_path=path).speculative_config == SUFFIX
    monkeypatch.setenv("LLAISYS_SPECULATIVE_CONFIG", text)
    assert load_config().speculative_config == SUFFIX
    assert load_config({"speculative_config": {"method": "ngram"}}).speculative_config != SUFFIX


def test_speculation_is_automatic_unless_it_is_configured(tmp_path: Path) -> None:
    assert load_config().speculative_config == SpeculativeConfig(method="auto")
    path = tmp_path / "config.yaml"
    path.write_text("speculative_config: null")
    assert load_config(yaml_path=path).speculative_config is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "medusa"}, "'ngram', 'suffix' or 'draft_model'"),
        ({}, "method"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "less than or equal to 16"),
        ({"method": "ngram", "tokens": 1}, "tokens"),
        ({"method": "draft_model"}, "model names the second model"),
        ({"method": "suffix", "model": "smollm2"}, "of no other method"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "more than prompt_lookup_max"),
        ("suffix", "speculative_config"),
    ],
)
def test_an_invalid_speculation_is_rejected_by_name(given: object, says: str) -> None:
    with pytest.raises(RejectedError, match=says) as error:
        load_config({"speculative_config": given})
    assert str(error.value.param).startswith("speculative_config")


def test_kv_events_are_vllms_json() -> None:
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv"}'
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    config = load_config(overrides_of(parser.parse_args(["--kv-events-config", text]))).kv_events_config
    assert config == KvEventsConfig(enable_kv_cache_events=True, topic="kv")
    assert config.endpoint == "tcp://*:5557"
    with pytest.raises(RejectedError, match="kv_events_config"):
        load_config({"kv_events_config": {"endpoint": "http://x"}})


@pytest.mark.parametrize("text", ["suffix", "[1]", "{", "[" * 100_000])
def test_a_speculation_flag_that_is_no_object_is_rejected(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--speculative-config", text])
    assert "is not" in capsys.readouterr().err
