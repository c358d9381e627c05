"""Flags that say how one answer is sampled, shared by `chat` and `generate`."""

from __future__ import annotations

import argparse
from typing import Any

from llaisys.cli.flags import flag_of, integer

# Field of SamplingParams, and of the HTTP API -> how it is read, what it means.
FIELDS: dict[str, tuple[Any, str]] = {
    "max_tokens": (integer, "tokens of the answer at most"),
    "min_tokens": (integer, "tokens before the answer may end"),
    "temperature": (float, "0 is greedy, 1 the model's own distribution"),
    "top_p": (float, "keep the likeliest tokens that make up this probability"),
    "top_k": (integer, "keep so many of the likeliest tokens; 0 keeps all"),
    "min_p": (float, "drop tokens below this share of the likeliest one's probability"),
    "repetition_penalty": (float, "above 1 makes tokens that were there before less likely"),
    "presence_penalty": (float, "subtracted once from tokens that the answer holds"),
    "frequency_penalty": (float, "subtracted for each time that the answer holds a token"),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field; what is not given comes from the model's own defaults."""
    group = parser.add_argument_group("sampling", "what is not given comes from the model's own defaults")
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
        help="end the answer before this text",
    )


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given."""
    return {name: value for name, value in vars(arguments).items() if name in FIELDS or name == "stop"}
