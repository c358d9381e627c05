"""Compute medians of ratios from rounds; write the table and the JSON of benches/results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from peers_limits import least_share, limit_share
from peers_rows import (
    BEST,
    OVERHEAD_AT_MOST,
    SCALING_AT_LEAST,
    TARGETS,
    THREADS,
    is_ours,
    isa,
    rows,
)

Round = dict[str, Any]
# A peer whose rate differs by more from the last committed one is marked: the machine or its build changed.
MOVED = 0.1


def tokens_per_s(by_context: dict[str, float]) -> float:
    """Return the rate over all contexts of a measurement (a harmonic mean)."""
    rates = [rate for context, rate in by_context.items() if context.isdigit()]
    return statistics.harmonic_mean(rates)


def ratios(found: Iterable[Round], engine: str, peer: str) -> list[float]:
    """Return the ratios of `engine` to `peer` (BEST: the fastest peer of the round), by round."""
    made = []
    for each in found:
        rates = {name: tokens_per_s(r) for name, r in each["rates"].items()}
        peers = {name: rate for name, rate in rates.items() if not is_ours(name)}
        against = max(peers.values(), default=0.0) if peer == BEST else peers.get(peer, 0.0)
        if engine in rates and against:
            made.append(rates[engine] / against)
    return made


def best_of_ours(summary: dict[str, Any]) -> str:
    """Return our engine of a row with the highest ratio to the best peer; the plain one without peers."""
    ours = {name: e["ratios"].get(BEST, 0.0) for name, e in summary["engines"].items() if is_ours(name)}
    return max(ours, key=ours.__getitem__)


def summarize(found: list[Round]) -> dict[str, Any]:
    """Summarize one row's rounds: medians of rates, of bandwidth, and of our ratios to every peer."""
    engines: dict[str, Any] = {}
    for name in found[-1]["rates"]:
        of_engine = [r["rates"][name] for r in found if name in r["rates"]]
        entry: dict[str, Any] = {"tokens_per_s": statistics.median(map(tokens_per_s, of_engine))}
        entry["by_context"] = {c: statistics.median(r[c] for r in of_engine) for c in of_engine[0]}
        if is_ours(name):
            peers = [BEST, *(peer for peer in found[-1]["rates"] if not is_ours(peer))]
            by_peer = {peer: ratios(found, name, peer) for peer in peers}
            entry["ratios"] = {peer: statistics.median(r) for peer, r in by_peer.items() if r}
        engines[name] = entry
    reads = [gb_s for each in found for gb_s in each["gb_s"]]
    summary = {"rounds": len(found), "gb_s": statistics.median(reads), "engines": engines}
    for key in ("load", "steal"):
        if known := [each[key] for each in found if key in each]:
            summary[key] = statistics.median(known)
    share = limit_share(found, best_of_ours(summary))
    newest = {key: found[-1][key] for key in ("build", "machine", "when")}
    return summary | ({"limit_share": share} if share else {}) | newest


def targets_met(table: dict[str, Any]) -> list[tuple[str, str, float, float, bool]]:
    """Return each measured target: row, peer, value, required value, whether it is met."""
    made = []
    for row, (peer, least) in TARGETS.items():
        if row in table:
            ours = table[row]["engines"][best_of_ours(table[row])]["ratios"]
            if peer in ours:
                made.append((row, peer, ours[peer], least, ours[peer] >= least))
    if {"decode-1-smollm2", "decode-16-smollm2"} <= table.keys():
        one, many = (table[f"decode-{n}-smollm2"]["engines"]["llaisys"]["tokens_per_s"] for n in (1, 16))
        made.append(
            (
                "decode-16-smollm2",
                "our 1 stream",
                many / one,
                SCALING_AT_LEAST,
                many / one >= SCALING_AT_LEAST,
            )
        )
    if "overhead-16-bf16" in table:
        share = overhead(table["overhead-16-bf16"])
        made.append(
            ("overhead-16-bf16", "a step, at most", share, OVERHEAD_AT_MOST, share <= OVERHEAD_AT_MOST)
        )
    for row in table:
        if row.startswith(("decode-1-", "decode-16-", "prefill-")) and "limit_share" in table[row]:
            share, least = table[row]["limit_share"], least_share(row)
            made.append((row, "physical limit", share, least, share >= least))
    return made


def overhead(summary: dict[str, Any]) -> float:
    """Return the fraction of a step outside the core, the mean over contexts."""
    return statistics.mean(summary["engines"]["llaisys"]["by_context"].values())


def round_line(each: Round) -> str:
    """Format one round."""
    parts = [f"{name} {tokens_per_s(r):.4g}" for name, r in each["rates"].items()]
    return f"{each['row']:22} {'  '.join(parts)}  ({statistics.median(each['gb_s']):.1f} GB/s)"


def table_of(found: list[Round]) -> dict[str, Any]:
    """Return summaries by row, in the order of the rows."""
    by_row: dict[str, list[Round]] = {}
    for each in found:
        by_row.setdefault(each["row"], []).append(each)
    return {row.name: summarize(by_row[row.name]) for row in rows() if row.name in by_row}


def moved(summary: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """Return the changes of the rates of peers since `before` that exceed MOVED, by peer.

    `before`: the row in the last committed run. If it was not measured again, its changes are kept.
    """
    engines, earlier = summary["engines"], before.get("engines", {})
    if engines == earlier:
        kept: dict[str, float] = before.get("moved", {})
        return kept
    if before.get("machine") != summary["machine"]:
        return {}
    peers = sorted(name for name in engines.keys() & earlier.keys() if not is_ours(name))
    changes = {peer: engines[peer]["tokens_per_s"] / earlier[peer]["tokens_per_s"] - 1 for peer in peers}
    return {peer: round(change, 3) for peer, change in changes.items() if abs(change) > MOVED}


def _percent(summary: dict[str, Any], key: str) -> str:
    return f"{summary[key]:.1%}" if key in summary else "–"


def markdown(table: dict[str, Any], about: dict[str, Any]) -> str:
    """Format the Markdown page."""
    peers = ["llama.cpp", "ik_llama.cpp", "openvino"]
    numbers = {machine: n for n, machine in enumerate(about["machines"], 1)}
    lines = [
        "# LLAISYS compared with peers"
        + ("" if isa(about["machines"][0]).startswith("avx512") else " without AVX-512"),
        "",
        "Machines: " + "; ".join(f"{n}: {name}" for name, n in numbers.items()) + ".",
        f"{about['threads']} threads; {about['date']}; core build {about['build']}.",
        "Versions: " + ", ".join(f"{name} {v}" for name, v in about["versions"].items()) + ".",
        "Tokens per second (medians); in brackets the median of our ratio to it, by round. Bold: our",
        "ratio to the best peer of each round. Of the limit: our share of what the machine allows, by",
        "bytes and operations (peers_limits.py). GB/s: the read bandwidth between the engines (median).",
        "Load: the load average before the run. Steal: the CPU time that the hypervisor gave to others.",
        f"*: this peer's rate moved by more than {MOVED:.0%} since its committed run before.",
        "",
        "| row | ours | "
        + " | ".join(peers)
        + " | to the best | of the limit | GB/s | load | steal | rounds | machine |",
        "| --- " * (len(peers) + 9) + "|",
    ]
    for row, summary in table.items():
        if row.startswith("overhead"):
            continue
        engines = summary["engines"]
        ours = best_of_ours(summary)
        setting = ours.partition("/")[2]
        own = engines[ours]
        older = "" if summary["build"] == about["build"] else " (older core)"
        cells = [row + older, f"{own['tokens_per_s']:.0f}" + (f" ({setting})" if setting else "")]
        for peer in peers:
            known = peer in engines
            mark = "*" if peer in summary["moved"] else ""
            cells.append(
                f"{engines[peer]['tokens_per_s']:.0f}{mark} ({own['ratios'][peer]:.2f}x)" if known else "–"
            )
        load = f"{summary['load']:.1f}" if "load" in summary else "–"
        limit = f"{summary['limit_share']:.0%}" if "limit_share" in summary else "–"
        cells += [f"**{own['ratios'][BEST]:.2f}x**", limit, f"{summary['gb_s']:.1f}", load]
        cells += [_percent(summary, "steal"), str(summary["rounds"]), str(numbers[summary["machine"]])]
        lines.append("| " + " | ".join(cells) + " |")
    changes = [(row, *change) for row, summary in table.items() for change in summary["moved"].items()]
    lines += [""] if changes else []
    lines += [f"- {row}: {peer} {change:+.0%}" for row, peer, change in changes]
    lines += ["", "| target | against | measured | wanted | |", "| --- " * 5 + "|"]
    for row, peer, value, wanted, met in targets_met(table):
        lines.append(f"| {row} | {peer} | {value:.3g} | {wanted:g} | {'met' if met else 'missed'} |")
    return "\n".join(lines) + "\n"


def write(found: list[Round], stem: Path, versions: dict[str, str], before: dict[str, Any]) -> None:
    """Write STEM.json and STEM.md of all rounds; print the targets.

    `versions`: those of the engines. `before`: the rows of the last committed run.
    """
    if not found:
        return
    table = table_of(found)
    about = {
        "machines": list(dict.fromkeys(summary["machine"] for summary in table.values())),
        "threads": THREADS,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "build": max(found, key=lambda each: str(each["when"]))["build"],
        "versions": versions,
    }
    for row, summary in table.items():
        summary["moved"] = moved(summary, before.get(row, {}))
    targets = [
        {"row": row, "against": peer, "measured": value, "wanted": wanted, "met": met}
        for row, peer, value, wanted, met in targets_met(table)
    ]
    pages = {
        ".json": json.dumps(about | {"targets": targets, "rows": table}, indent=1) + "\n",
        ".md": markdown(table, about),
    }
    for suffix, text in pages.items():
        stem.with_suffix(suffix).write_text(text, encoding="utf-8")
    for row, peer, value, wanted, met in targets_met(table):
        print(f"{'met   ' if met else 'missed'} {row:22} {peer:16} {value:6.3g} of {wanted:g}")
