"""Write the parts of docs/reference that come from the code; --check reports differences."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from llaisys.cli.main import COMMANDS
from llaisys.cli.parsing import Parser
from llaisys.config import GROUPS, Config, SpeculativeConfig
from llaisys.server import fields as known_fields
from llaisys.server import request_schemas
from llaisys.server.app import create_routes
from llaisys.server.messages.schemas import CountTokensRequest, MessagesRequest
from llaisys.server.responses.input import RESPONSES_NEUTRAL
from llaisys.server.responses.schemas import ResponsesRequest
from llaisys.server.state import ServerState

ROOT = Path(__file__).parents[1]
ROUTES: dict[str, tuple[type[BaseModel], Mapping[str, tuple[Any, ...]]]] = {
    "/v1/chat/completions": (request_schemas.ChatCompletionRequest, known_fields.CHAT_NEUTRAL),
    "/v1/completions": (request_schemas.CompletionRequest, known_fields.COMPLETION_NEUTRAL),
    "/v1/responses": (ResponsesRequest, RESPONSES_NEUTRAL),
    "/v1/embeddings": (request_schemas.EmbeddingRequest, known_fields.EMBEDDING_NEUTRAL),
    "/v1/rerank": (request_schemas.RerankRequest, known_fields.RERANK_NEUTRAL),
    "/score": (request_schemas.ScoreRequest, known_fields.SCORE_NEUTRAL),
    "/tokenize": (request_schemas.TokenizeRequest, known_fields.TOKENS_NEUTRAL),
    "/detokenize": (request_schemas.DetokenizeRequest, known_fields.TOKENS_NEUTRAL),
    "/v1/messages": (MessagesRequest, known_fields.MESSAGES_NEUTRAL),
    "/v1/messages/count_tokens": (CountTokensRequest, known_fields.MESSAGES_NEUTRAL),
}


def fields() -> str:
    """Return one row per field for each route: supported, or rejected except for no-op values."""
    parts = []
    for path, (model, neutral) in ROUTES.items():
        rows = [f"| `{name}` | served |" for name in sorted(model.model_fields)]
        for name in sorted(neutral):
            values = ", ".join(f"`{json.dumps(value)}`" for value in (None, *neutral[name]))
            rows.append(f"| `{name}` | 400, except {values} |")
        parts.append(f"### `{path}`\n\n| field | |\n|---|---|\n" + "\n".join(rows))
    no_effect = ", ".join(f"`{name}`" for name in sorted(known_fields.NO_EFFECT))
    return "\n\n".join([f"Without effect everywhere: {no_effect}.", *parts])


def settings() -> str:
    """Return one table per group of settings, in the order of `--help`."""
    parts = []
    for title, names in GROUPS.items():
        rows = [
            f"| `{name}` | {_default(field.default)} | {_cell(field.description)} |"
            for name, field in ((name, Config.model_fields[name]) for name in names)
        ]
        heading = title[0].upper() + title[1:]
        parts.append(f"## {heading}\n\n| setting | default | effect |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def commands() -> str:
    """Return the flags of each command. Its settings are in their own page."""
    parts = []
    for name, module in COMMANDS.items():
        subparsers = Parser(prog="llaisys").add_subparsers()
        module.add_parser(subparsers)
        for title, command in _leaves(name, subparsers.choices[name]):
            groups = [group for group in command._action_groups if group.title not in GROUPS]
            rows = [
                f"| {_flags(action)} | {_cell(action.help)} |"
                for group in groups
                for action in group._group_actions
                if not isinstance(action, argparse._HelpAction)
            ]
            table = "| flag | effect |\n|---|---|\n" + "\n".join(rows)
            epilog = command.epilog or subparsers.choices[name].epilog  # a subcommand has none of its own
            examples = f"```text\n{textwrap.dedent(epilog.partition(':')[2]).strip()}\n```"
            description = command.description[0].upper() + command.description[1:] + "."
            parts.append("\n\n".join([f"## `llaisys {title}`", description, table, examples]))
    return "\n\n".join(parts)


def _flags(action: argparse.Action) -> str:
    metavar = action.metavar or (None if action.nargs == 0 else " ".join(action.choices or ()))
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return " ".join(filter(None, [names, f"`{metavar}`" if metavar else ""]))


def _leaves(title: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a command, or its subcommands."""
    subcommands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not subcommands:
        yield title, parser
    for action in subcommands:
        for name, inner in action.choices.items():
            yield from _leaves(f"{title} {name}", inner)


def routes() -> str:
    """Return each route of the OpenAPI document: what it does, the fields of its body and its responses."""
    state = ServerState(Config(allow_runtime_lora_updating=True, allow_model_management=True))
    document = create_routes(state).openapi()
    schemas = document["components"]["schemas"]
    parts = []
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            lines = [
                f"## `{method.upper()} {path}`",
                "",
                (operation.get("description") or operation["summary"]).strip(),
            ]
            if (body := operation.get("requestBody")) is not None:
                schema = next(iter(body["content"].values()))["schema"]
                names = ", ".join(_names(schema, schemas)) or "any JSON object"
                lines += ["", f"Body: {names}."]
            statuses = ", ".join(
                f"{s} ({r['description']})" for s, r in sorted(operation["responses"].items())
            )
            lines += ["", f"Responses: {statuses}."]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _names(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[str]:
    """Return the fields of a body, the required ones in bold."""
    if (reference := schema.get("$ref")) is not None:
        schema = schemas[reference.rsplit("/", 1)[1]]
    required = schema.get("required", ())
    return [f"**`{name}`**" if name in required else f"`{name}`" for name in schema.get("properties", {})]


def _default(value: Any) -> str:
    if isinstance(value, SpeculativeConfig):
        return f'`{{"method": "{value.method}"}}`'
    return "" if value in (None, ()) else f"`{value}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def rendered(page: str, name: str, table: str) -> str:
    """Return the page with the table between its marks."""
    begin, end = f"<!-- {name}: made by scripts/doc_tables.py -->\n", f"\n<!-- end of {name} -->"
    assert begin in page, name
    assert end in page, name
    return re.sub(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", lambda _: table, page, flags=re.S)


PAGES = {
    "reference/http-api.md": ("fields", fields),
    "reference/settings.md": ("settings", settings),
    "reference/cli.md": ("commands", commands),
    "reference/openapi.md": ("routes", routes),
}


def main() -> int:
    """Write the pages; with --check only compare."""
    stale = []
    for file, (name, make) in PAGES.items():
        path = ROOT / "docs" / file
        page = path.read_text("utf-8")
        made = rendered(page, name, make())
        if made != page:
            stale.append(file)
            if "--check" not in sys.argv:
                path.write_text(made, "utf-8")
    if stale and "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}; run python scripts/doc_tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
