"""The flags of `llaisys bench`: the names of vLLM, and errors with a fix."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest

from llaisys.cli import bench
from llaisys.cli.main import main
from llaisys.cli.parsing import Parser


def parse(*arguments: str) -> argparse.Namespace:
    parser = Parser()
    bench.add_parser(parser.add_subparsers(dest="command", parser_class=Parser))
    return parser.parse_args(["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "WHAT"),
        (["serv"], "serv"),
        (
            ["serve", "--request-rte", "1"],
            "unknown arguments: --request-rte 1 (did you mean --request-rate?)",
        ),
        (["serve", "--num-prompts", "0"], "0 is below 1"),
        (["serve", "--request-rate", "0"], "0 is not above 0"),
        (["serve", "--request-rate", "nan"], "nan is not above 0"),
        (["serve", "--burstiness", "-1"], "-1 is not above 0"),
        (["serve", "--max-concurrency", "x"], "'x' is not a whole number"),
        (["serve", "--random-range-ratio", "1"], "1 is not in [0, 1)"),
        (["serve", "--goodput", "itl:3"], "'itl:3' is not NAME:MS, NAME one of ttft, tpot, e2el"),
        (["serve", "--goodput", "ttft"], "'ttft' is not NAME:MS"),
        (["serve", "--goodput", "ttft:x"], "'x' is not a number"),
        (["serve", "--metric-percentiles", "50,101"], "percentiles are 0 to 100"),
        (["serve", "--percentile-metrics", "ttft,tbt"], "'tbt' is not one of ttft"),
        (["serve", "--header", "x"], "'x' is not KEY=VALUE"),
        (["serve", "--extra-body", "[1]"], "'[1]' is not a JSON object"),
        (["serve", "--dataset-name", "sharegpt"], "sharegpt"),
        (["throughput", "--dataset-name", "chat"], "chat"),
        (["latency", "--batch-size", "0"], "0 is below 1"),
    ],
)
def test_invalid_flags_are_explained(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_conversation_needs_the_chat_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--dataset-name", "chat", "--backend", "openai"]) == 1
    assert "conversations need --backend openai-chat" in capsys.readouterr().err


def test_an_unreachable_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("llaisys bench: cannot get a model name from http://127.0.0.1:1/v1/models")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {"request_rate": math.inf, "max_concurrency": None, "seed": 0, "percentiles": [99.0]}),
        (("--goodput", "ttft:500", "tpot:50"), {"objectives_ms": {"ttft": 500.0, "tpot": 50.0}}),
        (("--metric-percentiles", "50,99.9"), {"percentiles": [50.0, 99.9]}),
        (("--request-rate", "2.5", "--burstiness", "0.5"), {"request_rate": 2.5, "burstiness": 0.5}),
    ],
)
def test_flags_become_a_benchmark(arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    made = bench._serve_bench(parse("serve", *arguments))
    assert {name: getattr(made, name) for name in expected} == expected


def test_flags_become_request_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAISYS_API_KEY", "secret")
    made = bench._serve_bench(
        parse("serve", "--temperature", "0", "--extra-body", '{"seed": 1}', "--header", "x-a=b=c")
    )
    assert made.target.fields == {"temperature": 0.0, "ignore_eos": True, "seed": 1}
    assert made.target.headers == {"authorization": "Bearer secret", "x-a": "b=c"}


@pytest.mark.parametrize(
    ("arguments", "backend", "as_text", "ignores_eos"),
    [
        ((), "openai", False, True),
        (("--prompt-format", "text"), "openai", True, True),
        (("--backend", "openai-chat", "--no-ignore-eos"), "openai-chat", True, False),
        (("--dataset-name", "chat"), "openai-chat", True, False),
        (("--dataset-name", "chat", "--ignore-eos"), "openai-chat", True, True),
    ],
)
def test_the_dataset_and_flags_select_backend_and_prompt_format(
    arguments: tuple[str, ...], backend: str, as_text: bool, ignores_eos: bool
) -> None:
    made = bench._serve_bench(parse("serve", *arguments))
    assert (made.target.backend, made.workload.as_text) == (backend, as_text)
    assert made.target.fields.get("ignore_eos", False) is ignores_eos


def test_vllms_names_of_lengths() -> None:
    arguments = (
        "--random-input-len",
        "1K",
        "--random-output-len",
        "7",
        "--prefix-repetition-prefix-len",
        "9",
    )
    made = bench._serve_bench(parse("serve", "--dataset-name", "prefix_repetition", *arguments)).workload
    assert (made.input_len, made.output_len, made.prefix_len) == (1024, 7, 9)
