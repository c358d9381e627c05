"""Sampling flags of `chat` and `generate`."""

from __future__ import annotations

import argparse
from typing import Any

from llaisys.cli.config_flags import flag_of, integer

# Field of SamplingParams and of the HTTP API -> its type and help text.
FIELDS: dict[str, tuple[Any, str]] = {
    "max_tokens": (integer, "maximum tokens of the completion"),
    "min_tokens": (integer, "minimum tokens of the completion"),
    "temperature": (float, "0 is greedy, 1 the model's own distribution"),
    "top_p": (float, "keep the most likely tokens up to this total probability"),
    "top_k": (integer, "keep this many of the most likely tokens; 0 keeps all"),
    "min_p": (float, "drop tokens below this fraction of the highest probability"),
    "repetition_penalty": (float, "above 1 makes tokens of prompt and completion less likely"),
    "presence_penalty": (float, "subtracted once from the logits of tokens in the completion"),
    "frequency_penalty": (float, "subtracted from a token's logit for each occurrence in the completion"),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field; omitted fields use the model's defaults."""
    group = parser.add_argument_group("sampling", "omitted settings use the model's defaults")
    for name, (read, text) in FIELDS.items():
        group.add_argument(
            flag_of(name),
            dest=name,
            type=read,
            metavar="N" if read is integer else "X",
            default=argparse.SUPPRESS,
            help=text,
        )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="end the completion before this text",
    )


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields given as flags."""
    return {name: value for name, value in vars(arguments).items() if name in FIELDS or name == "stop"}
