"""`llaisys serve`: serve a model with the OpenAI API and the web UI."""

from __future__ import annotations

import argparse

from llaisys.cli.config_flags import add_config_flags, config_of
from llaisys.cli.parsing import Commands, add_command


def add_parser(commands: Commands) -> None:
    """Add `llaisys serve [MODEL]`."""
    parser = add_command(
        commands,
        "serve",
        "serve a model with the OpenAI API (/v1) and a web UI (/)",
        """
        llaisys serve
        llaisys serve path/to/model --port 8001 --max-num-seqs 16
        LLAISYS_API_KEY=secret llaisys serve model.gguf --host 0.0.0.0
        llaisys serve --config configs/example.yaml
        """,
    )
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    from llaisys.server.lifecycle import serve

    return serve(config_of(arguments))
