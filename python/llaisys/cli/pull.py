"""`llaisys pull`: download a model into its cache."""

from __future__ import annotations

import argparse

from llaisys.cli.parsing import Commands, add_command
from llaisys.hub import pull


def add_parser(commands: Commands) -> None:
    """Add `llaisys pull NAME`."""
    parser = add_command(
        commands,
        "pull",
        "download a model into its cache: LLAISYS_HOME (by default ~/.cache/llaisys) for embedded models, "
        "HF_HOME (by default ~/.cache/huggingface) for those of the Hugging Face Hub",
        """
        llaisys pull smollm2
        llaisys pull Qwen/Qwen2.5-0.5B-Instruct --revision main
        llaisys pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0
        HF_TOKEN=hf_... llaisys pull meta-llama/Llama-3.2-1B-Instruct --quiet
        """,
    )
    parser.add_argument("name", help="a name that `llaisys models` lists, or org/name, or org/name:FILE.gguf")
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    parser.add_argument("--quiet", action="store_true", help="print only the path, without progress")


def run(arguments: argparse.Namespace) -> int:
    """Print the path on stdout and progress on stderr."""
    print(pull(arguments.name, arguments.revision, progress=not arguments.quiet))
    return 0
