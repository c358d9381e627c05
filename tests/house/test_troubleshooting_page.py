"""docs/operations/troubleshooting.md quotes messages that the code writes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations" / "troubleshooting.md"
# Messages of other programs.
OTHERS = {"gated", "Illegal instruction"}


def quoted() -> list[str]:
    """Return the fixed parts of all messages in the first columns of the page's tables of messages."""
    tables = re.findall(r"\| message \|.*?\n((?:\|.*\n)+)", PAGE.read_text("utf-8"))
    cells = [line.split("|")[1] for table in tables for line in table.splitlines()[1:]]
    messages = [span for cell in cells for span in re.findall(r"(?<!`)`` ?(.*?) ?``(?!`)|`([^`]+)`", cell)]
    parts = [part.strip() for pair in messages for part in re.split(r"\.\.\.", pair[0] or pair[1])]
    return [part for part in parts if len(part) > 3 and part not in OTHERS]


def sources() -> str:
    """Return the text of the code, with literals that are written in pieces joined."""
    files = [
        *(ROOT / "python").rglob("*.py"),
        *(ROOT / "crates").rglob("*.rs"),
        *(ROOT / "scripts").glob("*"),
    ]
    text = "\n".join(file.read_text("utf-8") for file in files if file.is_file())
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # Python
    text = re.sub(r"\\\n\s*", "", text)  # Rust
    return text + (ROOT / "Makefile").read_text("utf-8")


def test_quoted_messages_are_in_the_code() -> None:
    code = sources()
    parts = quoted()
    assert len(parts) > 40
    missing = [part for part in parts if part not in code]
    assert not missing, missing
