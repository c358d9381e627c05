"""`llaisys run-batch`: answers a file of requests, without a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from llaisys.cli.flags import SERVER_ONLY, add_config_flags, config_of
from llaisys.cli.parsing import Commands, add_command
from llaisys.errors import RejectedError

# A batch has answers to give like a server's, but nobody connects to it.
_WITHOUT = SERVER_ONLY - {
    "served_model_name",
    "models",
    "strict_fields",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
}


def add_parser(commands: Commands) -> None:
    """`llaisys run-batch [MODEL] -i IN -o OUT`."""
    parser = add_command(
        commands,
        "run-batch",
        "answer a file of requests (OpenAI's batch JSONL: chat, completions, embeddings)",
        """
        llaisys run-batch -i requests.jsonl -o results.jsonl
        llaisys run-batch path/to/model --served-model-name gpt-4o-mini -i in.jsonl -o out.jsonl
        """,
    )
    for short, name, text in (
        ("-i", "--input-file", "one request a line: {custom_id, method, url, body}"),
        ("-o", "--output-file", "one result a line, in the same order; replaced if it is there"),
    ):
        parser.add_argument(short, name, metavar="FILE", type=Path, required=True, help=text)
    add_config_flags(parser, without=_WITHOUT | {"api_key", "chat_store"})


def run(arguments: argparse.Namespace) -> int:
    """Writes a result for each line; what came of them goes to stderr. Exit code 0: every line has its
    result, if only an error."""
    config = config_of(arguments)
    source, target = arguments.input_file, arguments.output_file
    if target.exists() and source.exists() and target.samefile(source):
        raise RejectedError(f"{source} is both the input and the output", param="output-file")
    from llaisys.server.batch import run_batch

    try:
        lines = source.open(encoding="utf-8", errors="surrogateescape")
    except OSError as e:
        raise RejectedError(f"cannot read {source}: {e.strerror}", param="input-file") from e
    with lines:
        try:
            out = target.open("a", encoding="utf-8")  # emptied once the model is loaded
        except OSError as e:
            raise RejectedError(f"cannot write {target}: {e.strerror}", param="output-file") from e
        with out:
            report = asyncio.run(run_batch(config, lines, out))
    print(f"{report.n_lines} requests, {report.n_failed} of them answered with an error", file=sys.stderr)
    return 0
