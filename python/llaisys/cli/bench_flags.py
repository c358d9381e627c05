"""The flags of `llaisys bench`, with vLLM's names."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from llaisys.cli.config_flags import CLIENT_SETTINGS, add_config_flags, flag_of, integer
from llaisys.cli.parsing import Commands, Parser, add_command
from llaisys.cli.sampling_flags import FIELDS

DATASETS = ("random", "prefix_repetition", "chat")
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
OBJECTIVES = ("ttft", "tpot", "e2el")
SAMPLING = [name for name in FIELDS if name not in ("max_tokens", "min_tokens")]


def add_serve(benchmarks: Commands) -> None:
    """Add `llaisys bench serve`."""
    parser = add_command(
        benchmarks,
        "serve",
        "send load to any OpenAI-compatible server",
        """
        llaisys bench serve --num-prompts 200 --input-len 128 --output-len 64 --request-rate 4
        llaisys bench serve --dataset-name chat --max-concurrency 8 --goodput ttft:500 tpot:50
        llaisys bench serve --base-url http://127.0.0.1:8080 --model any --save-result --plot run.svg
        """,
    )
    _add_server_flags(parser)
    _add_workload_flags(parser, DATASETS, num_prompts=1000)
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--seed", type=integer, default=0, metavar="N", help="seed of prompts and arrival times (default: 0)"
    )
    group.add_argument(
        "--request-rate",
        type=_rate,
        default="inf",
        metavar="X",
        help="requests per second (default: all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=_rate,
        default=1.0,
        metavar="X",
        help="1: Poisson; below 1: bursts; above 1: more regular (default: 1)",
    )
    group.add_argument(
        "--max-concurrency", type=_count, metavar="N", help="maximum concurrent requests (default: no limit)"
    )
    group.add_argument(
        "--num-warmups",
        type=_count,
        default=1,
        metavar="N",
        help="requests before the measurement (default: 1)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate completions of full length (default: on, except for chat)",
    )
    for name in SAMPLING:
        group.add_argument(flag_of(name), dest=name, type=FIELDS[name][0], metavar="X", help=FIELDS[name][1])
    group.add_argument(
        "--extra-body", type=_mapping, default={}, metavar="JSON", help="further fields of each request"
    )
    _add_metric_flags(parser)


def _add_server_flags(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="address of the server, with or without /v1 (default: %(default)s)",
    )
    group.add_argument(
        "--backend",
        choices=("openai", "openai-chat"),
        help="openai: /v1/completions, openai-chat: /v1/chat/completions (default: openai; openai-chat for "
        "--dataset-name chat)",
    )
    group.add_argument(
        "--endpoint", default="", metavar="PATH", help="path of requests (default: the backend's)"
    )
    group.add_argument(
        "--model", default="", metavar="NAME", help="model to request (default: the first of /v1/models)"
    )
    group.add_argument("--api-key", metavar="KEY", help="key to send (default: LLAISYS_API_KEY)")
    group.add_argument(
        "--header",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="header of each request; may be repeated",
    )


def _add_workload_flags(parser: Parser, datasets: tuple[str, ...], num_prompts: int) -> None:
    group = parser.add_argument_group("workload", "lengths are in tokens")
    group.add_argument(
        "--dataset-name", choices=datasets, default="random", help="kind of prompts (default: %(default)s)"
    )
    group.add_argument(
        "--num-prompts", type=_count, default=num_prompts, metavar="N", help="requests (default: %(default)s)"
    )
    group.add_argument(
        "--input-len",
        "--random-input-len",
        type=_count,
        default=1024,
        metavar="N",
        help="length of a prompt, after its prefix (default: 1024)",
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        "--prefix-repetition-output-len",
        type=_count,
        default=128,
        metavar="N",
        help="length of a completion (default: 128)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=_fraction,
        default=0.0,
        metavar="X",
        help="lengths vary by up to this fraction (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=integer,
        default=0,
        metavar="N",
        help="length of a prefix shared by all prompts (default: 0)",
    )
    for name, default, text in (
        ("prefix-len", 256, "length of each shared prefix"),
        ("suffix-len", 256, "length of a prompt after its prefix"),
        ("num-prefixes", 10, "number of shared prefixes"),
    ):
        group.add_argument(
            f"--prefix-repetition-{name}",
            type=_count,
            default=default,
            metavar="N",
            help=f"{text}, for prefix_repetition (default: {default})",
        )
    if "chat" in datasets:
        group.add_argument(
            "--chat-turns", type=_count, default=4, metavar="N", help="requests per conversation (default: 4)"
        )
        group.add_argument(
            "--prompt-format",
            choices=("ids", "text"),
            default="ids",
            help="ids: token ids; text: English words of about one token, for servers that accept no ids "
            "(default: ids; chat always sends text)",
        )
        group.add_argument(
            "--vocab-size",
            type=_count,
            default=10_000,
            metavar="N",
            help="upper bound of token ids (default: 10000)",
        )


def _add_metric_flags(parser: Parser) -> None:
    group = parser.add_argument_group("metrics")
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=["ttft", "tpot", "itl", "e2el"],
        metavar="A,B",
        help="metrics to print (default: ttft,tpot,itl,e2el)",
    )
    group.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=[99.0],
        metavar="A,B",
        help="percentiles to report (default: 99)",
    )
    group.add_argument(
        "--goodput",
        type=_objective,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives for goodput: ttft, tpot, e2el, in milliseconds",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="include the metrics of every request")
    group.add_argument("--append-result", action="store_true", help="append to the file, one line per run")
    group.add_argument(
        "--result-dir", type=Path, default=Path(), metavar="DIR", help="folder of the JSON file (default: .)"
    )
    group.add_argument(
        "--result-filename", metavar="FILE", help="name of the JSON file (default: from rate, model, date)"
    )
    group.add_argument(
        "--metadata",
        type=_pair,
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="values to add to the JSON file",
    )
    group.add_argument("--plot", type=Path, metavar="FILE.svg", help="plot distributions and throughput")


def add_throughput(benchmarks: Commands) -> None:
    """Add `llaisys bench throughput [MODEL]`."""
    parser = add_command(
        benchmarks,
        "throughput",
        "tokens per second of many concurrent requests, without a server",
        "llaisys bench throughput smollm2 --num-prompts 64 --input-len 128 --output-len 128",
    )
    _add_workload_flags(parser, DATASETS[:2], num_prompts=1000)
    parser.add_argument(
        "--n", type=_count, default=1, metavar="N", help="completions per prompt (default: 1)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="sampling temperature; 0 is greedy (default: 1.0)",
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the result as JSON")
    add_config_flags(parser, CLIENT_SETTINGS)


def add_latency(benchmarks: Commands) -> None:
    """Add `llaisys bench latency [MODEL]`."""
    parser = add_command(
        benchmarks,
        "latency",
        "seconds per batch, without a server and without prefix caching",
        "llaisys bench latency smollm2 --batch-size 1 --input-len 128 --output-len 128",
    )
    parser.add_argument(
        "--input-len", type=_count, default=32, metavar="N", help="tokens of a prompt (default: 32)"
    )
    parser.add_argument(
        "--output-len", type=_count, default=128, metavar="N", help="tokens of a completion (default: 128)"
    )
    parser.add_argument(
        "--batch-size", type=_count, default=8, metavar="N", help="concurrent requests (default: 8)"
    )
    parser.add_argument(
        "--n", type=_count, default=1, metavar="N", help="completions per prompt (default: 1)"
    )
    parser.add_argument(
        "--num-iters-warmup",
        type=integer,
        default=10,
        metavar="N",
        help="batches before the measurement (default: 10)",
    )
    parser.add_argument(
        "--num-iters", type=_count, default=30, metavar="N", help="measured batches (default: 30)"
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the result as JSON")
    add_config_flags(parser, CLIENT_SETTINGS)


def _count(text: str) -> int:
    number = integer(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from e


def _rate(text: str) -> float:
    number = _number(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _fraction(text: str) -> float:
    number = _number(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return number


def _percentiles(text: str) -> list[float]:
    numbers = [_number(part) for part in text.split(",")]
    if not all(0 <= number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: percentiles are 0 to 100")
    return numbers


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(METRICS)}")
    return names


def _objective(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in OBJECTIVES or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:MS, NAME one of {', '.join(OBJECTIVES)}")
    return name, _rate(value)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
