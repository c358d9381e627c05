"""Draw the chart of README.md from peers.json: four groups of bars, light and dark.

    python benches/chart.py [FOLDER]    # default: docs/assets

Each group has its own scale, because their rates differ by a factor of ten.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers_report import best_of_ours

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benches" / "results" / "peers.json"
# Groups of the chart: the row of peers.json, and what it is.
GROUPS = {
    "decode-1-8bit": "Decode, 1 stream",
    "decode-16-8bit": "Decode, 16 streams",
    "prefill-512-8bit": "Prompts of 512 tokens",
    "http-16-8bit": "Over HTTP, 16 clients",
}
ENGINES = {
    "llaisys": "LLAISYS",
    "llama.cpp": "llama.cpp",
    "ik_llama.cpp": "ik_llama.cpp",
    "openvino": "OpenVINO",
}
THEMES = {
    "light": {"text": "#1f2328", "faint": "#59636e", "ours": "#1f6feb", "peer": "#b6bec8"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "ours": "#4493f8", "peer": "#57606a"},
}
WIDE, HIGH, COLUMN, LEFT, FULL, BAR, TOP = 880, 340, 440, 96, 250, 22, 66
GROUP_HIGH = 136


def _text(x: float, y: float, words: str, color: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}" {more}>{words}</text>'


def _group(
    title: str, rates: dict[str, float], at: tuple[float, float], theme: dict[str, str]
) -> Iterator[str]:
    left, top = at
    yield _text(left, top, title, theme["text"], 'font-weight="600"')
    fastest = max(rates.values())
    for i, (engine, rate) in enumerate(rates.items()):
        y, width = top + 10 + i * BAR, FULL * rate / fastest
        color = theme["ours" if engine == "llaisys" else "peer"]
        yield _text(left + LEFT - 8, y + 15, ENGINES[engine], theme["text"], 'text-anchor="end"')
        x = left + LEFT
        yield f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR - 5}" rx="2" fill="{color}"/>'
        yield _text(left + LEFT + width + 6, y + 15, f"{rate:.0f}", theme["text"])


def chart(table: dict[str, Any], theme: dict[str, str]) -> str:
    """Return the chart as SVG. `table`: the content of peers.json."""
    title = "Tokens per second, Qwen2.5-0.5B's shape in 8 bits (longer is better)"
    shown = [table["rows"][row] for row in GROUPS]
    machines = " and ".join(sorted({row["machine"] for row in shown}))
    date = max(row["when"] for row in shown)[:10]
    where = f"{machines}, {table['threads']} threads, random weights, {date}; medians of at least 7 rounds"
    parts = [
        _text(16, 24, title, theme["text"], 'font-size="15" font-weight="600"'),
        _text(16, 43, where, theme["faint"]),
    ]
    for i, (row, name) in enumerate(GROUPS.items()):
        engines = table["rows"][row]["engines"]
        key = {"llaisys": best_of_ours(table["rows"][row])}
        rates = {e: engines[key.get(e, e)]["tokens_per_s"] for e in ENGINES if key.get(e, e) in engines}
        at = (16 + COLUMN * (i % 2), TOP + 10 + GROUP_HIGH * (i // 2))
        parts += _group(name, rates, at, theme)
    font = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" {font}>'
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>"]) + "\n"


def main() -> None:
    """Write the chart for both themes."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "assets"
    folder.mkdir(parents=True, exist_ok=True)
    table = json.loads(PEERS.read_text("utf-8"))
    for name, theme in THEMES.items():
        (folder / f"performance-{name}.svg").write_text(chart(table, theme), "utf-8")


if __name__ == "__main__":
    main()
