"""Rules of this repository that no linter checks."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 500
MAX_TREE_MIB = 30
CODE = {".rs", ".py", ".pyi", ".js", ".ts", ".svelte", ".css", ".sh", ".cu", ".cuh", ".h"}

# A module of the core (the key) uses only the modules of the value; test_core_modules.py refuses cycles.
CORE_MAY_USE = {
    "dtype": set(),
    "tensor": {"dtype", "error"},
    "seq": set(),
    "progress": set(),
    "faults": {"error"},
    "batch": {"error", "seq"},
    "kv": {"batch", "dtype", "error", "seq", "tensor"},
    "threads": {"error"},
    "collective": {"error"},
    "quant": {"dtype", "tensor"},
    "arch": {"error", "ops"},
    "load": {"arch", "dtype", "error", "ops", "quant", "tensor", "threads"},
    "forward": {"arch", "dtype", "error", "load", "ops", "progress", "quant", "tensor", "threads"},
    "sample": {"error", "ops"},  # the vector search for the largest logit
    "ops": {"collective", "dtype", "error", "quant", "tensor", "threads"},
}


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


def test_core_modules_use_only_lower_modules() -> None:
    src = ROOT / "crates" / "llaisys-core" / "src"
    broken = []
    for path in sorted(src.rglob("*.rs")):
        module = path.relative_to(src).parts[0].removesuffix(".rs")
        if module not in CORE_MAY_USE:
            continue
        code = re.sub(r"//.*", "", path.read_text("utf-8"))
        used = set(re.findall(r"\bcrate::(\w+)", code)) - {module}
        if extra := used - CORE_MAY_USE[module]:
            broken.append(f"{path.relative_to(ROOT)} uses {sorted(extra)}")
    assert not broken, broken


def test_a_panic_of_the_core_unwinds_in_every_profile() -> None:
    """The binding turns a panic into an exception (reliability R8); an abort would end every request."""
    manifest = (ROOT / "Cargo.toml").read_text("utf-8")
    assert re.search(r'\[profile\.release\][^\[]*panic = "unwind"', manifest)
    abort = [p for p in tracked() if p.name in ("Cargo.toml", "config.toml") and '"abort"' in p.read_text()]
    assert not abort


def test_only_config_reads_the_environment() -> None:
    readers = []
    for path in (ROOT / "python" / "llaisys").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name in ("os.environ", "os.getenv") and path.parent.name != "config":
                readers.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not readers, f"environment variables are read in llaisys.config only: {readers}"


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


def test_each_command_has_its_file() -> None:
    commands = {p.stem for p in (ROOT / "python" / "llaisys" / "cli").glob("*.py")}
    assert {"serve", "chat", "generate", "pull", "models", "doctor"} <= commands


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "make serve" in readme
    assert "make test" in readme


def test_paths_named_in_top_level_pages_exist() -> None:
    missing = []
    for page in ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"):
        for name in re.findall(
            r"`((?:crates|python|tests|benches|docs|configs|webui|scripts)/[\w./*-]+)`",
            (ROOT / page).read_text("utf-8"),
        ):
            if not list(ROOT.glob(name.rstrip("/"))):
                missing.append(f"{page}: {name}")
    assert not missing, missing


def test_only_the_worker_imports_the_compiled_core() -> None:
    """import-linter cannot see a compiled module, so this test checks the rule."""
    package = ROOT / "python" / "llaisys"
    importers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (
            isinstance(node, ast.ImportFrom)
            and f"{node.module}.{node.names[0].name}".startswith("llaisys._core")
        )
        or (isinstance(node, ast.Import) and any(a.name == "llaisys._core" for a in node.names))
    }
    assert importers == {"engine/worker.py"}
