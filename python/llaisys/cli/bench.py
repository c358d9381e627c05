"""`llaisys bench serve|throughput|latency`, with vLLM's flags and metrics."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llaisys.cli.bench_flags import SAMPLING, add_latency, add_serve, add_throughput
from llaisys.cli.config_flags import config_of
from llaisys.cli.parsing import Commands, Parser, add_command
from llaisys.config import Config, load_config
from llaisys.errors import RejectedError

if TYPE_CHECKING:
    from llaisys.bench.serve_benchmark import ServeBenchmark
    from llaisys.bench.workload import Workload


def add_parser(commands: Commands) -> None:
    """Add `llaisys bench serve|throughput|latency`."""
    parser = add_command(
        commands,
        "bench",
        "benchmark a server, or the engine alone, with vLLM's flags and metrics",
        """
        llaisys bench serve --base-url http://127.0.0.1:8000 --request-rate 4
        llaisys bench throughput smollm2 --num-prompts 64 --input-len 128
        llaisys bench latency smollm2 --batch-size 1
        """,
    )
    benchmarks = parser.add_subparsers(dest="bench", metavar="WHAT", required=True, parser_class=Parser)
    add_serve(benchmarks)
    add_throughput(benchmarks)
    add_latency(benchmarks)


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark and print its metrics; return exit code 1 if no request succeeded."""
    match arguments.bench:
        case "serve":
            return _serve(arguments)
        case "throughput":
            return _throughput(arguments)
    return _latency(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    from llaisys.bench import report
    from llaisys.bench.benchmark_metrics import request_details
    from llaisys.bench.plot import svg

    bench = _serve_bench(arguments)
    print(f"seed {bench.seed}: {bench.workload.num_prompts} requests to {bench.target.url}")
    result, done = bench.run()
    result |= dict(arguments.metadata)
    print(report.serve_text(result, arguments.percentile_metrics))
    if arguments.save_result or arguments.append_result:
        name = (
            f"{bench.target.backend}-{result['request_rate']}qps-{result['model_id']}-{result['date']}.json"
        )
        path = arguments.result_dir / (arguments.result_filename or name.replace("/", "_"))
        detailed = request_details(done.records) if arguments.save_detailed else {}
        report.write_json(path, {**result, **detailed}, append=arguments.append_result)
    if arguments.plot is not None:
        arguments.plot.write_text(
            svg(done.records, f"{result['model_id']}, {result['date']}"), encoding="utf-8"
        )
    return 0 if result["completed"] else 1


def _serve_bench(arguments: argparse.Namespace) -> ServeBenchmark:
    from llaisys.bench.http_client import Backend, Target
    from llaisys.bench.serve_benchmark import ServeBenchmark

    is_chat = arguments.dataset_name == "chat"
    if is_chat and arguments.backend == "openai":
        raise RejectedError("conversations need --backend openai-chat", param="backend")
    backend: Backend = arguments.backend or ("openai-chat" if is_chat else "openai")
    fields = {name: getattr(arguments, name) for name in SAMPLING if getattr(arguments, name) is not None}
    if arguments.ignore_eos is True or (arguments.ignore_eos is None and not is_chat):
        fields["ignore_eos"] = True
    keys = (arguments.api_key,) if arguments.api_key else load_config().api_key
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    return ServeBenchmark(
        target=Target(
            base_url=arguments.base_url,
            backend=backend,
            endpoint=arguments.endpoint,
            model=arguments.model,
            headers={**headers, **dict(arguments.header)},
            fields={**fields, **arguments.extra_body},
        ),
        workload=_workload(arguments, as_text=backend == "openai-chat" or arguments.prompt_format == "text"),
        seed=arguments.seed,
        request_rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        max_concurrency=arguments.max_concurrency,
        warmups=arguments.num_warmups,
        percentiles=arguments.metric_percentiles,
        objectives_ms=dict(arguments.goodput),
        progress=not arguments.disable_tqdm,
    )


def _workload(arguments: argparse.Namespace, *, as_text: bool = False) -> Workload:
    from llaisys.bench.workload import Workload

    repeats = arguments.dataset_name == "prefix_repetition"
    return Workload(
        dataset=arguments.dataset_name,
        num_prompts=arguments.num_prompts,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        range_ratio=arguments.random_range_ratio,
        prefix_len=arguments.prefix_repetition_prefix_len if repeats else arguments.random_prefix_len,
        suffix_len=arguments.prefix_repetition_suffix_len,
        num_prefixes=arguments.prefix_repetition_num_prefixes,
        turns=getattr(arguments, "chat_turns", 1),
        vocab_size=getattr(arguments, "vocab_size", 10_000),
        as_text=as_text,
    )


def _throughput(arguments: argparse.Namespace) -> int:
    from llaisys.bench.offline_benchmark import throughput

    config = config_of(arguments)
    result = throughput(config, _workload(arguments), arguments.n, arguments.temperature)
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} "
        f"total tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s (seed {config.seed})"
    )
    print(f"Total num prompt tokens:  {result['total_input_tokens']}")
    print(f"Total num output tokens:  {result['total_output_tokens']}")
    _write_output(arguments.output_json, result)
    return 0


def _latency(arguments: argparse.Namespace) -> int:
    from llaisys.bench.offline_benchmark import latency
    from llaisys.bench.workload import Workload

    config = config_of(arguments)
    if "enable_prefix_caching" not in config.model_fields_set:
        # With prefix caching only the first iteration would compute the prompts.
        config = Config(**config.model_dump(exclude_unset=True), enable_prefix_caching=False)
    batch = Workload(
        num_prompts=arguments.batch_size, input_len=arguments.input_len, output_len=arguments.output_len
    )
    result = latency(config, batch, arguments.n, arguments.num_iters_warmup, arguments.num_iters)
    print(f"Avg latency: {result['avg_latency']:.4f} seconds (seed {config.seed})")
    print(f"Std latency: {result['std_latency']:.4f} seconds")
    for percentile, value in result["percentiles"].items():
        print(f"{percentile}% percentile latency: {value:.4f} seconds")
    _write_output(arguments.output_json, result)
    return 0


def _write_output(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        from llaisys.bench.report import write_json

        write_json(path, result)
