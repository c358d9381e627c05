"""Write the tables of docs/api.md and docs/configuration.md from the code; --check reports differences."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from llaisys.config import Config
from llaisys.server import fields as known_fields
from llaisys.server import request_schemas
from llaisys.server.messages.schemas import CountTokensRequest, MessagesRequest
from llaisys.server.responses.input import RESPONSES_NEUTRAL
from llaisys.server.responses.schemas import ResponsesRequest

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
    """Return one row per setting, in the order of the code."""
    rows = [
        f"| `{name}` | {_default(field.default)} | {_cell(field.description)} |"
        for name, field in Config.model_fields.items()
    ]
    return "| setting | default | |\n|---|---|---|\n" + "\n".join(rows)


def _default(value: Any) -> str:
    return "" if value in (None, ()) else f"`{value}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def rendered(page: str, name: str, table: str) -> str:
    """Return the page with the table between its marks."""
    begin, end = f"<!-- {name}: made by scripts/doc_tables.py -->\n", f"\n<!-- end of {name} -->"
    assert begin in page, name
    assert end in page, name
    return re.sub(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", lambda _: table, page, flags=re.S)


PAGES = {"api.md": ("fields", fields), "configuration.md": ("settings", settings)}


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
