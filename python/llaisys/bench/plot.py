"""Plots a run as one SVG: the distributions of TTFT, TPOT and E2EL, and tokens per second over time.

Four step lines need no plotting library.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from llaisys.bench.benchmark_metrics import METRICS, output_rate
from llaisys.bench.request_record import RequestRecord

WIDTH, HEIGHT, LEFT, TOP, GAP = 360, 200, 60, 40, 70
PANELS = (("ttft", "TTFT, ms"), ("tpot", "TPOT, ms"), ("e2el", "E2EL, ms"))
STYLE = (
    "text{font:12px sans-serif;fill:#333}.axis{stroke:#999;fill:none}.line{stroke:#06c;fill:none;"
    "stroke-width:1.5}.mark{stroke:#c60;stroke-dasharray:3}rect{fill:#fff}"
)


def svg(records: Sequence[RequestRecord], title: str) -> str:
    """Return the SVG. Each distribution marks its median and 99th percentile."""
    done = [r for r in records if not r.error]
    panels = [_distribution(i, text, METRICS[name](done)) for i, (name, text) in enumerate(PANELS)]
    panels.append(_over_time(3, "output tokens per second, over time in seconds", output_rate(done)))
    width, height = 2 * (LEFT + WIDTH) + 40, TOP + 2 * (HEIGHT + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{STYLE}</style>'
        f'<rect width="{width}" height="{height}"/><text x="{LEFT}" y="20">{escape(title)}</text>'
        f"{''.join(panels)}</svg>\n"
    )


def _distribution(i: int, text: str, values_s: Sequence[float]) -> str:
    """Draw a cumulative distribution."""
    values = 1e3 * np.sort(np.array(values_s or [0.0]))
    most = max(float(values[-1]), 1e-9)
    points = [(0.0, 0.0), *((float(x) / most, (k + 1) / len(values)) for k, x in enumerate(values))]
    marks = [(f"p{p}", float(np.percentile(values, p))) for p in (50, 99)]
    label = f"{text} ({', '.join(f'{name} {x:.4g}' for name, x in marks)})"
    return _panel(i, label, points, most, 1.0, [x / most for _, x in marks])


def _over_time(i: int, text: str, rate: Sequence[float]) -> str:
    values = rate or [0.0]
    most = max(*values, 1e-9) if len(values) > 1 else max(values[0], 1e-9)
    points = [(k / len(values), value / most) for k, value in enumerate(values)]
    return _panel(i, text, [*points, (1.0, points[-1][1])], len(values), most, [])


def _panel(
    i: int,
    text: str,
    points: Sequence[tuple[float, float]],
    x_max: float,
    y_max: float,
    marks: Sequence[float],
) -> str:
    """Draw one step line in a frame. Points and marks are fractions of the frame, y upwards."""
    left, top = LEFT + (i % 2) * (WIDTH + LEFT), TOP + (i // 2) * (HEIGHT + GAP)
    path, last_y = [f"M{left} {top + HEIGHT}"], 0.0
    for x, y in points:
        at = left + x * WIDTH
        path.append(f"L{at:.1f} {top + HEIGHT * (1 - last_y):.1f}L{at:.1f} {top + HEIGHT * (1 - y):.1f}")
        last_y = y
    lines = "".join(f'<path class="mark" d="M{left + m * WIDTH:.1f} {top}v{HEIGHT}"/>' for m in marks)
    return (
        f'<path class="axis" d="M{left} {top}V{top + HEIGHT}H{left + WIDTH}"/>{lines}'
        f'<path class="line" d="{"".join(path)}"/><text x="{left}" y="{top - 6}">{escape(text)}</text>'
        f'<text x="{left + WIDTH}" y="{top + HEIGHT + 16}" text-anchor="end">{x_max:.4g}</text>'
        f'<text x="{left - 4}" y="{top + 10}" text-anchor="end">{y_max:.4g}</text>'
        f'<text x="{left}" y="{top + HEIGHT + 16}">0</text>'
    )
