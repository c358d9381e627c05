"""Rules of this repository that no linter checks."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 500
MAX_TREE_MIB = 40
CODE = {".rs", ".py", ".pyi", ".js", ".ts", ".svelte", ".css", ".sh", ".cu", ".cuh", ".h"}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_has_more_than_500_lines() -> None:
    long = {}
    for path in tracked():
        if path.suffix in CODE:
            n_lines = len(path.read_text("utf-8").splitlines())
            if n_lines > MAX_LINES:
                long[str(path.relative_to(ROOT))] = n_lines
    assert not long, f"split these, {MAX_LINES} lines is the limit: {long}"


def test_the_tree_stays_small() -> None:
    size = sum(path.stat().st_size for path in tracked())
    assert size <= MAX_TREE_MIB * 2**20, f"the tree has {size / 2**20:.1f} MiB, the limit is {MAX_TREE_MIB}"


def test_a_panic_of_the_core_unwinds_in_every_profile() -> None:
    """The binding turns a panic into an exception; an abort would end every request."""
    manifest = (ROOT / "Cargo.toml").read_text("utf-8")
    assert re.search(r'\[profile\.release\][^\[]*panic = "unwind"', manifest)
    abort = [p for p in tracked() if p.name in ("Cargo.toml", "config.toml") and '"abort"' in p.read_text()]
    assert not abort


def reads_environment(node: ast.AST) -> bool:
    """Return whether a node is `os.environ` or `os.getenv`, or imports one of them by name."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and bool({"environ", "getenv"} & {a.name for a in node.names})
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")


def test_only_config_reads_the_environment() -> None:
    readers = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "python" / "llaisys").rglob("*.py")
        if path.parent.name != "config"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if reads_environment(node)
    ]
    assert not readers, f"environment variables are read in llaisys.config only: {readers}"


def test_every_way_to_read_the_environment_is_detected() -> None:
    def detected(code: str) -> bool:
        return any(map(reads_environment, ast.walk(ast.parse(code))))

    assert detected("os.environ['A']")
    assert detected("x = os.getenv('A')")
    assert detected("from os import getenv")
    assert not detected("import os; os.getpid()")


def test_every_suppressed_lint_has_a_reason() -> None:
    bare = []
    for path in tracked():
        if path.suffix not in (".py", ".pyi", ".rs") or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            silenced = re.search(r"#\s*noqa(:\s*[\w, ]+)?\s*$|#\s*pragma: no cover\s*$", line)
            rust = re.search(r"#!?\[allow\((?!.*reason)[^)]*\)\]", line)
            if silenced or rust:
                bare.append(f"{path.relative_to(ROOT)}:{number}")
    assert not bare, f"give the reason on the line: {bare}"


def test_there_are_no_todos_or_skipped_tests() -> None:
    marks = re.compile(
        r"\b(TODO|FIXME|XXX)\b|unimplemented!|todo!\(|NotImplementedError|mark\.(skip|xfail)|#\[ignore"
    )
    left = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.suffix in CODE and path != Path(__file__)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert not left, left


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "make serve" in readme
    assert "make test" in readme


def test_paths_named_in_pages_exist() -> None:
    pages = [
        path
        for path in tracked()
        if path.suffix == ".md" and not path.is_relative_to(ROOT / "tests" / "data")
    ]
    missing = []
    for page in pages:
        for name in re.findall(
            r"`((?:crates|python|tests|benches|docs|configs|webui|scripts)/[\w./*-]+)`",
            page.read_text("utf-8"),
        ):
            if not list(ROOT.glob(name.rstrip("/"))):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert len(pages) > 20
    assert not missing, missing


def imports_core(node: ast.AST) -> bool:
    """Return whether a node imports the compiled module, as a whole or names from it."""
    if isinstance(node, ast.Import):
        return any(name.name.startswith("llaisys._core") for name in node.names)
    if not isinstance(node, ast.ImportFrom):
        return False
    module = "." * node.level + (node.module or "")
    return module.split(".")[-1] == "_core" or any(name.name == "_core" for name in node.names)


def test_only_the_workers_import_the_compiled_core() -> None:
    """import-linter cannot see a compiled module, so this test checks the rule."""
    package = ROOT / "python" / "llaisys"
    importers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if imports_core(node)
    }
    assert importers == {"engine/worker.py", "engine/encoder_worker.py"}


def test_every_import_of_the_core_is_detected() -> None:
    def detected(code: str) -> bool:
        return any(map(imports_core, ast.walk(ast.parse(code))))

    assert detected("import llaisys._core as core")
    assert detected("from llaisys import outputs, _core")
    assert detected("from llaisys._core import Context")
    assert detected("from .. import _core")
    assert detected("from .._core import Context")
    assert not detected("from pydantic_core import CoreSchema")
