"""The flags of `llaisys bench`, by vLLM's names."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from llaisys.cli.flags import SERVER_ONLY, add_config_flags, flag_of, integer
from llaisys.cli.parsing import Commands, Parser, add_command
from llaisys.cli.sampling import FIELDS

DATASETS = ("random", "prefix_repetition", "chat")
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
OBJECTIVES = ("ttft", "tpot", "e2el")
SAMPLING = [name for name in FIELDS if name not in ("max_tokens", "min_tokens")]


def add_serve(kinds: Commands) -> None:
    """`llaisys bench serve`."""
    parser = add_command(
        kinds,
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
    group.add_argument("--seed", type=integer, default=0, metavar="N", help="of prompts and arrivals")
    group.add_argument(
        "--request-rate",
        type=_rate,
        default="inf",
        metavar="X",
        help="requests a second (default: all at once)",
    )
    group.add_argument(
        "--burstiness", type=_rate, default=1.0, metavar="X", help="1: Poisson; less: bursts; more: steadier"
    )
    group.add_argument("--max-concurrency", type=_count, metavar="N", help="requests under way at most")
    group.add_argument(
        "--num-warmups", type=_count, default=1, metavar="N", help="requests before (default: 1)"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers have their full length (default: all but chat)",
    )
    for name in SAMPLING:
        group.add_argument(flag_of(name), dest=name, type=FIELDS[name][0], metavar="X", help=FIELDS[name][1])
    group.add_argument(
        "--extra-body", type=_mapping, default={}, metavar="JSON", help="more fields of each request"
    )
    _add_figure_flags(parser)


def _add_server_flags(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="with or without /v1"
    )
    group.add_argument(
        "--backend",
        choices=("openai", "openai-chat"),
        help="/v1/completions or /v1/chat/completions (default: openai, for chat openai-chat)",
    )
    group.add_argument("--endpoint", default="", metavar="PATH", help="the path, where it is another one")
    group.add_argument("--model", default="", metavar="NAME", help="(default: the first of /v1/models)")
    group.add_argument("--api-key", metavar="KEY", help="(default: the variable LLAISYS_API_KEY)")
    group.add_argument(
        "--header", type=_pair, action="append", default=[], metavar="KEY=VALUE", help="repeatable"
    )


def _add_workload_flags(parser: Parser, datasets: tuple[str, ...], num_prompts: int) -> None:
    group = parser.add_argument_group("workload", "lengths are in tokens")
    group.add_argument("--dataset-name", choices=datasets, default="random")
    group.add_argument(
        "--num-prompts", type=_count, default=num_prompts, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument(
        "--input-len", "--random-input-len", type=_count, default=1024, metavar="N", help="(default: 1024)"
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        "--prefix-repetition-output-len",
        type=_count,
        default=128,
        metavar="N",
        help="(default: 128)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=_share,
        default=0.0,
        metavar="X",
        help="lengths differ by this share at most",
    )
    group.add_argument(
        "--random-prefix-len", type=integer, default=0, metavar="N", help="tokens that all share"
    )
    for name, default in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10)):
        group.add_argument(
            f"--prefix-repetition-{name}",
            type=_count,
            default=default,
            metavar="N",
            help=f"(default: {default})",
        )
    if "chat" in datasets:
        group.add_argument(
            "--chat-turns", type=_count, default=4, metavar="N", help="requests of a conversation"
        )
        group.add_argument(
            "--prompt-format",
            choices=("ids", "text"),
            default="ids",
            help="text: English words, a token each, for servers that take no ids (chat is always text)",
        )
        group.add_argument(
            "--vocab-size", type=_count, default=10_000, metavar="N", help="ids are below it (default: 10000)"
        )


def _add_figure_flags(parser: Parser) -> None:
    group = parser.add_argument_group("figures")
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=["ttft", "tpot", "itl", "e2el"],
        metavar="A,B",
        help="printed",
    )
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default=[99.0], metavar="A,B", help="(default: 99)"
    )
    group.add_argument(
        "--goodput",
        type=_objective,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives: ttft, tpot, e2el, in milliseconds",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with lists of every request's figures")
    group.add_argument("--append-result", action="store_true", help="append to it, a line each run")
    group.add_argument("--result-dir", type=Path, default=Path(), metavar="DIR", help="(default: here)")
    group.add_argument("--result-filename", metavar="FILE", help="(default: named by rate, model and time)")
    group.add_argument(
        "--metadata", type=_pair, nargs="*", default=[], metavar="KEY=VALUE", help="kept in the file"
    )
    group.add_argument("--plot", type=Path, metavar="FILE.svg", help="distributions and throughput over time")


def add_throughput(kinds: Commands) -> None:
    """`llaisys bench throughput [MODEL]`."""
    parser = add_command(
        kinds,
        "throughput",
        "tokens a second of many requests at once, without a server",
        "llaisys bench throughput smollm2 --num-prompts 64 --input-len 128 --output-len 128",
    )
    _add_workload_flags(parser, DATASETS[:2], num_prompts=1000)
    parser.add_argument("--n", type=_count, default=1, metavar="N", help="answers to each prompt")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="(default: 1.0)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="the result as JSON")
    add_config_flags(parser, without=SERVER_ONLY)


def add_latency(kinds: Commands) -> None:
    """`llaisys bench latency [MODEL]`."""
    parser = add_command(
        kinds,
        "latency",
        "seconds of one batch, without a server and without prefix caching",
        "llaisys bench latency smollm2 --batch-size 1 --input-len 128 --output-len 128",
    )
    parser.add_argument("--input-len", type=_count, default=32, metavar="N", help="(default: 32)")
    parser.add_argument("--output-len", type=_count, default=128, metavar="N", help="(default: 128)")
    parser.add_argument("--batch-size", type=_count, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--n", type=_count, default=1, metavar="N", help="answers to each prompt")
    parser.add_argument("--num-iters-warmup", type=integer, default=10, metavar="N", help="(default: 10)")
    parser.add_argument("--num-iters", type=_count, default=30, metavar="N", help="(default: 30)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="the result as JSON")
    add_config_flags(parser, without=SERVER_ONLY)


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


def _share(text: str) -> float:
    number = _number(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in 0 to 1 (1 left out)")
    return number


def _percentiles(text: str) -> list[float]:
    numbers = [_number(part) for part in text.split(",")]
    if not all(0 <= number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: percentiles are 0 to 100")
    return numbers


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(METRICS)}")
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
