"""`llaisys generate`: complete one text without a server."""

from __future__ import annotations

import argparse
import sys

from llaisys.cli.config_flags import add_config_flags, config_of
from llaisys.cli.parsing import Commands, add_command
from llaisys.cli.sampling_flags import add_sampling_flags, sampling_of
from llaisys.config import EngineConfig
from llaisys.errors import RejectedError

MAX_TOKENS_DEFAULT = 256


def add_parser(commands: Commands) -> None:
    """Add `llaisys generate [MODEL] --prompt TEXT`."""
    parser = add_command(
        commands,
        "generate",
        "complete a text and stream the result to stdout",
        """
        llaisys generate --prompt "The capital of France is" --max-tokens 8 --temperature 0
        llaisys generate path/to/model < prompt.txt > completion.txt
        """,
    )
    parser.add_argument("--prompt", help="the text to complete (default: all of stdin)")
    add_sampling_flags(parser)
    add_config_flags(parser, EngineConfig.model_fields)


def run(arguments: argparse.Namespace) -> int:
    """Stream the completion to stdout, then a newline."""
    prompt = arguments.prompt if arguments.prompt is not None else _stdin()
    config = config_of(arguments)
    fields = {"max_tokens": MAX_TOKENS_DEFAULT, **sampling_of(arguments)}
    from llaisys.cli.local_model import LocalModel

    with LocalModel(config) as model:
        model.complete(prompt, fields, _show)
        _show("\n")
    return 0


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _stdin() -> str:
    if sys.stdin.isatty():
        raise RejectedError("there is no prompt; use --prompt TEXT, or pipe a text to stdin", param="prompt")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise RejectedError(f"stdin is not UTF-8 at byte {e.start}", param="prompt") from e
