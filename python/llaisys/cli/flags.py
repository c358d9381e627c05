"""Flags from the configuration: each field of Config is one, so that a setting is described once.

`max_num_seqs` becomes `--max-num-seqs`, a bool `--name` and `--no-name`, a tuple a flag that may be repeated.
Only flags that were given are passed on; the rest comes from the environment, the file, or the default.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from llaisys.config import OF_THE_SERVER, Config, Source, explain_config, load_config
from llaisys.errors import RejectedError

SUFFIXES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}

# Settings that only a server has; the other commands leave them out. (A client has a key, too.)
SERVER_ONLY = (OF_THE_SERVER - {"api_key"}) | {
    "preload",
    "idle_unload_s",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
}

# Flags that peers spell otherwise: vLLM's, and uvicorn's.
ALIASES = {
    "shutdown_timeout_s": ("--shutdown-timeout",),
    "timeout_keep_alive_s": ("--timeout-keep-alive",),
    "tensor_parallel_size": ("-tp",),
}


def add_config_flags(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Adds MODEL, `--config FILE` and a flag for every field of Config that is not in `without`."""
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="same as --model")
    group = parser.add_argument_group(
        "settings",
        "each is also a variable (LLAISYS_MAX_NUM_SEQS) and a key of the --config file (max_num_seqs)",
    )
    group.add_argument(
        "--config", metavar="FILE", type=Path, help="a YAML file of settings; flags go before it"
    )
    for name, field in Config.model_fields.items():
        if name not in without:
            flags = (flag_of(name), *ALIASES.get(name, ()))
            group.add_argument(
                *flags, dest=name, default=argparse.SUPPRESS, help=_help(field), **_form(field)
            )


def overrides_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags. Raises RejectedError for two models."""
    values = {name: value for name, value in vars(arguments).items() if name in Config.model_fields}
    named = arguments.model_argument
    if named is not None and values.setdefault("model", named) != named:
        raise RejectedError(f"MODEL is {named}, --model {values['model']}; give one of them", param="model")
    return values


def config_of(arguments: argparse.Namespace) -> Config:
    """The configuration: flags, then environment, then `--config`, then defaults. Raises RejectedError."""
    return load_config(overrides_of(arguments), arguments.config)


def explained_config_of(arguments: argparse.Namespace) -> tuple[Config, dict[str, Source]]:
    """As `config_of`, with where each value comes from."""
    return explain_config(overrides_of(arguments), arguments.config)


def flag_of(name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def integer(text: str) -> int:
    """A whole number, perhaps with a suffix: `1k` is 1000, `1K` is 1024; m/M and g/G likewise."""
    match = re.fullmatch(r"([+-]?\d+)([kKmMgG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(match[1]) * SUFFIXES[match[2]]


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    if get_origin(field.annotation) is tuple:
        return f"{text}; may be repeated"
    if field.default in (None, ()) or isinstance(field.default, bool):
        return text
    return f"{text} (default: {field.default})"


def _form(field: FieldInfo) -> dict[str, Any]:
    """How argparse reads a field of this type; ranges are checked by Config."""
    kind = _without_none(field.annotation)
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {"action": "append", "metavar": "TEXT"}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    readers: dict[Any, tuple[Callable[[str], Any], str]] = {
        int: (integer, "N"),
        float: (float, "X"),
        Path: (Path, "FILE"),
    }
    read, metavar = readers.get(kind, (str, "TEXT"))
    return {"type": read, "metavar": metavar}


def _without_none(annotation: Any) -> Any:
    """`int | None` -> `int`."""
    if get_origin(annotation) in (Union, UnionType):  # one and the same from Python 3.14
        (annotation,) = [part for part in get_args(annotation) if part is not NoneType]
    return annotation
