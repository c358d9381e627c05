"""docs/models/index.md: every architecture of the tables in the core has its row."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARCH = ROOT / "crates" / "llaisys-core" / "src" / "arch"


def test_every_architecture_is_on_the_page() -> None:
    page = (ROOT / "docs" / "models" / "index.md").read_text("utf-8")
    sources = "\n".join(path.read_text("utf-8") for path in ARCH.rglob("*.rs"))
    fields = r"(?:architecture|gguf_architecture|base|masked|classifier)"
    known = set(re.findall(rf'\b{fields}: "([\w.-]+)"', sources))
    assert len(known) > 50
    missing = sorted(name for name in known if f"`{name}`" not in page)
    assert not missing, missing
