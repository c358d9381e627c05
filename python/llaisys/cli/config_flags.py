"""Generates command-line flags from the configuration, so that each setting is described once.

`max_num_seqs` becomes `--max-num-seqs`, a bool `--name` and `--no-name`, a tuple a repeatable flag. Settings
without a flag come from the environment, the file, or the default.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from llaisys.config import (
    GROUPS,
    Config,
    EngineConfig,
    KvEventsConfig,
    LoraModule,
    Source,
    SpeculativeConfig,
    explain_config,
    load_config,
)
from llaisys.errors import RejectedError

SUFFIXES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}

# Other spellings of flags: vLLM's and uvicorn's.
ALIASES = {
    "shutdown_timeout_s": ("--shutdown-timeout",),
    "timeout_keep_alive_s": ("--timeout-keep-alive",),
    "tensor_parallel_size": ("-tp",),
}

# Settings of commands without a server: those of an engine, and the key of a client.
CLIENT_SETTINGS = EngineConfig.model_fields.keys() | {"api_key"}


def add_config_flags(
    parser: argparse.ArgumentParser, settings: Collection[str] = Config.model_fields.keys()
) -> None:
    """Add MODEL, `--config FILE` and a flag for each of `settings`, fields of Config, in groups."""
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="same as --model")
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="a YAML file of settings, by the flags' names (max_num_seqs); each is also an environment "
        "variable (LLAISYS_MAX_NUM_SEQS); flags override both",
    )
    for title, names in GROUPS.items():
        if shown := [name for name in names if name in settings]:
            group = parser.add_argument_group(title)
            for name in shown:
                _add_flag(group, name)


def _add_flag(group: argparse._ArgumentGroup, name: str) -> None:
    field = Config.model_fields[name]
    flags = (flag_of(name), *ALIASES.get(name, ()))
    group.add_argument(
        *flags, dest=name, default=argparse.SUPPRESS, help=_help(field), **_parser_options(field)
    )


def overrides_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given as flags. Raises RejectedError for two models."""
    values = {name: value for name, value in vars(arguments).items() if name in Config.model_fields}
    named = arguments.model_argument
    if named is not None and values.setdefault("model", named) != named:
        raise RejectedError(f"MODEL is {named}, --model {values['model']}; use one of them", param="model")
    return values


def config_of(arguments: argparse.Namespace) -> Config:
    """Load the configuration; flags override the environment, `--config` and defaults, in this order.

    Raises RejectedError.
    """
    return load_config(overrides_of(arguments), arguments.config)


def explained_config_of(arguments: argparse.Namespace) -> tuple[Config, dict[str, Source]]:
    """Load the configuration as `config_of`, with the source of each value."""
    return explain_config(overrides_of(arguments), arguments.config)


def flag_of(name: str) -> str:
    """Return the flag of a setting: `max_num_seqs` -> `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def integer(text: str) -> int:
    """Parse an integer with an optional suffix: `1k` is 1000, `1K` is 1024; m/M and g/G likewise."""
    match = re.fullmatch(r"([+-]?\d+)([kKmMgG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(match[1]) * SUFFIXES[match[2]]


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    if get_origin(field.annotation) is tuple:
        return f"{text}; may be repeated"
    if field.default in (None, ()) or isinstance(field.default, bool | SpeculativeConfig):
        return text
    return f"{text} (default: {field.default})"


def _parser_options(field: FieldInfo) -> dict[str, Any]:
    """Return argparse options for a field of this type; Config checks ranges."""
    kind = _without_none(field.annotation)
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple and get_args(kind)[0] is LoraModule:
        return {"action": "extend", "nargs": "+", "metavar": "NAME=PATH"}  # as in vLLM
    if get_origin(kind) is tuple:
        return {"action": "append", "metavar": "TEXT"}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    readers: dict[Any, tuple[Callable[[str], Any], str]] = {
        SpeculativeConfig: (json_object, "JSON"),
        KvEventsConfig: (json_object, "JSON"),
        int: (integer, "N"),
        float: (float, "X"),
        Path: (Path, "FILE"),
    }
    read, metavar = readers.get(kind, (str, "TEXT"))
    return {"type": read, "metavar": metavar}


def _without_none(annotation: Any) -> Any:
    """Return a type without None: `int | None` -> `int`."""
    if get_origin(annotation) in (Union, UnionType):  # the same type from Python 3.14 on
        (annotation,) = [part for part in get_args(annotation) if part is not NoneType]
    return annotation
