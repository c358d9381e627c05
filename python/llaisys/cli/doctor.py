"""`llaisys doctor`: report hardware, packages and caches, and what is missing."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from llaisys.cli.parsing import Commands, add_command
from llaisys.config import package_version


def add_parser(commands: Commands) -> None:
    """Add `llaisys doctor`."""
    parser = add_command(
        commands,
        "doctor",
        "report hardware, packages and caches; exit code 1 if LLAISYS cannot run",
        "llaisys doctor\nllaisys doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="a list of {subject, detail, fine}")


def run(arguments: argparse.Namespace) -> int:
    """Print the report on stdout."""
    from llaisys.doctor import Finding, examine

    findings = [Finding("llaisys", package_version()), *examine()]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return 0 if all(finding.fine for finding in findings) else 1
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{'ok' if finding.fine else '!!'}  {finding.subject.ljust(width)}  {finding.detail}")
    return 0 if all(finding.fine for finding in findings) else 1
