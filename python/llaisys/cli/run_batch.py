"""`llaisys run-batch`: run a file of requests without a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from llaisys.cli.config_flags import add_config_flags, config_of
from llaisys.cli.parsing import Commands, add_command
from llaisys.config import EngineConfig
from llaisys.errors import RejectedError

# The server settings that a batch uses: it has the server's handlers, but does not listen on a port.
_SETTINGS = EngineConfig.model_fields.keys() | {
    "served_model_name",
    "models",
    "strict_fields",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
}


def add_parser(commands: Commands) -> None:
    """Add `llaisys run-batch [MODEL] -i IN -o OUT`."""
    parser = add_command(
        commands,
        "run-batch",
        "run a file of requests (OpenAI's batch JSONL: chat, completions, embeddings, rerank, score)",
        """
        llaisys run-batch -i requests.jsonl -o results.jsonl
        llaisys run-batch path/to/model --served-model-name gpt-4o-mini -i in.jsonl -o out.jsonl
        """,
    )
    for short, name, text in (
        ("-i", "--input-file", "one request per line: {custom_id, method, url, body}"),
        ("-o", "--output-file", "one result per line, in the same order; an existing file is replaced"),
    ):
        parser.add_argument(short, name, metavar="FILE", type=Path, required=True, help=text)
    add_config_flags(parser, _SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Write a result for each line and a summary to stderr; the exit code is 0 even if results are errors."""
    config = config_of(arguments)
    source, target = arguments.input_file, arguments.output_file
    if target.exists() and source.exists() and target.samefile(source):
        raise RejectedError(f"{source} is both the input and the output", param="output-file")
    from llaisys.server.batch_runner import run_batch

    try:
        lines = source.open(encoding="utf-8", errors="surrogateescape")
    except OSError as e:
        raise RejectedError(f"cannot read {source}: {e.strerror}", param="input-file") from e
    with lines:
        try:
            out = target.open("a", encoding="utf-8")  # truncated after the model is loaded
        except OSError as e:
            raise RejectedError(f"cannot write {target}: {e.strerror}", param="output-file") from e
        with out:
            report = asyncio.run(run_batch(config, lines, out))
    print(f"{report.n_lines} requests, {report.n_failed} of them failed", file=sys.stderr)
    return 0
