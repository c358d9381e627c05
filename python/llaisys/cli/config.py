"""`llaisys config show`: every setting with its value and its source."""

from __future__ import annotations

import argparse
import json
from typing import Any

from llaisys.cli.config_flags import add_config_flags, explained_config_of
from llaisys.cli.parsing import Commands, add_command
from llaisys.config import GROUPS, SECRETS
from llaisys.logs import without_credentials

MASK = "***"


def add_parser(commands: Commands) -> None:
    """Add `llaisys config show [MODEL] [flags]`."""
    parser = add_command(
        commands,
        "config",
        "show every setting, its value and its source: flag, environment, file or default",
        """
        llaisys config show
        llaisys config show --config configs/example.yaml --port 8001
        llaisys config show --json
        """,
    )
    actions = parser.add_subparsers(dest="action", metavar="show", required=True)
    show = actions.add_parser("show", description="show every setting, its value and its source")
    show.add_argument("--json", action="store_true", help="an object of {name: {value, source}}")
    add_config_flags(show)


def run(arguments: argparse.Namespace) -> int:
    """Print the settings on stdout in the order of `llaisys serve --help`, with secrets masked."""
    config, sources = explained_config_of(arguments)
    dumped = config.model_dump(mode="json")
    values = {name: _shown(name, dumped[name]) for names in GROUPS.values() for name in names}
    if arguments.json:
        shown = {name: {"value": value, "source": sources[name]} for name, value in values.items()}
        print(json.dumps(shown, indent=2))
        return 0
    width = max(map(len, values))
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    value_width = max(map(len, texts.values()))
    for name, text in texts.items():
        print(f"{name.ljust(width)}  {text.ljust(value_width)}  {sources[name]}")
    return 0


def _shown(name: str, value: Any) -> Any:
    """Return the value for display: one mask per secret, addresses without credentials."""
    if isinstance(value, str):
        value = without_credentials(value)
    if name not in SECRETS or value in (None, [], ""):
        return value
    return [MASK] * len(value) if isinstance(value, list) else MASK
