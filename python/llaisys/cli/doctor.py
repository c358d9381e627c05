"""`llaisys doctor`: what this machine offers and what is missing."""

from __future__ import annotations

import argparse

from llaisys.cli.parsing import Commands, add_command
from llaisys.config import package_version


def add_parser(commands: Commands) -> None:
    """`llaisys doctor`."""
    add_command(
        commands,
        "doctor",
        "report what this machine offers; exit code 1 if LLAISYS cannot run here",
        "llaisys doctor",
    )


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001 -- every command has this signature
    """Prints the report on stdout."""
    from llaisys.doctor import Finding, examine

    findings = [Finding("llaisys", package_version()), *examine()]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{'ok' if finding.fine else '!!'}  {finding.subject.ljust(width)}  {finding.detail}")
    return 0 if all(finding.fine for finding in findings) else 1
