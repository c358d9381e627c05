"""The examples of README and docs run as printed; links lead somewhere; generated parts match the code.

A block of shell or Python code runs against a server of SmolLM2, unless the line before it says why it does
not (*Not run in CI: needs a cluster.*). A `llaisys serve` in it is only read: `llaisys config show` takes the
same flags, and rejects what the server would reject.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from serving import END_S, environment

ROOT = Path(__file__).parents[2]
LOCAL = "http://127.0.0.1:8000"
PAGES = [*ROOT.glob("README*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
# Languages of blocks that are programs.
PROGRAMS = ("bash", "sh", "python")
# The line before a block that does not run, in both languages of the pages.
NOT_RUN = re.compile(r"^\*(Not run in CI|未在 CI 中)[^*\n]+\*$")


def blocks() -> Iterator[tuple[str, str, str, bool]]:
    """Yield each block of code: where it is, its language, its text and whether it runs."""
    for page in PAGES:
        before, language, code = "", None, []
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            if line.startswith("```") and language is None:
                language, begin, code = line[3:], number, []
            elif line == "```" and language is not None:
                where = f"{page.relative_to(ROOT)}:{begin}"
                yield where, language, "\n".join(code) + "\n", not NOT_RUN.match(before)
                before, language = "", None
            elif language is not None:
                code.append(line)
            elif line.strip():
                before = line
        assert language is None, f"{page}: a block has no end"


ALL = list(blocks())
# A program that several pages have, such as those of both languages, runs once.
PLACES: dict[tuple[str, str], str] = {}
for where, language, text, runs in ALL:
    if runs and language in PROGRAMS and not text.startswith("make "):
        PLACES.setdefault((language, text), where)
RUN = [pytest.param(*program, id=where) for program, where in PLACES.items()]


def as_run(text: str, url: str) -> str:
    """Return a block with this server's address and this environment's command."""
    text = re.sub(r"^export PATH=.*\n", "", text, flags=re.M).replace(".venv/bin/llaisys", "llaisys")
    text = re.sub(r"\bllaisys serve\b", "llaisys config show", text)
    return text.replace(LOCAL, url)


@pytest.mark.model
@pytest.mark.parametrize(("language", "text"), RUN)
def test_an_example_runs(smollm2_server: str, tmp_path: Path, language: str, text: str) -> None:
    program = as_run(text, smollm2_server)
    shell = ["bash", "-euo", "pipefail", "-c", program]
    command = [sys.executable, "-c", program] if language == "python" else shell
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_blocks_that_do_not_run_are_few_and_say_why() -> None:
    marked = [where for where, language, _, runs in ALL if language in PROGRAMS and not runs]
    assert len(RUN) > 40
    assert len(marked) < len(RUN) / 2
    unnamed = [where for where, language, _, _ in ALL if not language]
    assert not unnamed, "name the language of these blocks, or text"


def test_targets_of_make_in_examples_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = {name for _, _, text, _ in ALL for name in re.findall(r"^make ([a-z-]+)", text, re.M)}
    assert {"serve", "wheel"} <= named
    assert not [name for name in named if f"\n{name}:" not in makefile]


def test_links_lead_to_files_and_headings() -> None:
    """`make docs` checks the site; this checks what GitHub shows."""
    broken = []
    for page in sorted({*PAGES, *ROOT.glob("*.md"), ROOT / "benches" / "results" / "README.md"}):
        text = re.sub(r"```.*?```|`[^`\n]+`", "", page.read_text("utf-8"), flags=re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
            target, _, anchor = "".join(link).partition("#")
            if re.match(r"\w+:", target):
                continue
            file = (page.parent / target).resolve() if target else page
            is_missing = not file.exists() or (
                bool(anchor) and file.suffix == ".md" and anchor not in anchors_of(file)
            )
            if is_missing:
                broken.append(f"{page.relative_to(ROOT)}: {''.join(link)}")
    assert not broken, broken


@cache
def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.*?)(?: \{ #([\w-]+) \})?$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading, _ in headings)
    return {*plain, *(anchor for _, anchor in headings if anchor)}


def test_the_tables_match_the_code() -> None:
    command = [sys.executable, "scripts/doc_tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (
        "index.html",
        "concepts/architecture/index.html",
        "zh/getting-started/quick-start/index.html",
    ):
        assert (tmp_path / page).exists(), page
    assert "快速开始" in (tmp_path / "zh" / "index.html").read_text("utf-8")
    assert "LLM.generate" in (tmp_path / "reference" / "python" / "index.html").read_text("utf-8").replace(
        "</span>", ""
    )
