"""docs/project/unsafe.md lists exactly the files with `unsafe` code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CRATES = ROOT / "crates"
PAGE = ROOT / "docs" / "project" / "unsafe.md"
# The keyword in code: a block, a function, an implementation, a trait, or a function pointer's type.
UNSAFE = re.compile(r"\bunsafe\s*(\{|fn\b|impl\b|trait\b|extern\b)")
# The lint attribute of a module at its `mod` line, or of a whole file (`#!`).
ALLOWANCE = re.compile(r"#!\[allow\(unsafe_code\b|#\[allow\(unsafe_code\b[^\]]*\]\s*(?:pub )?mod (\w+);")

# A child module that is a file of its own, with its attributes.
CHILD = re.compile(r"((?:#\[[^\n]*\]\s*)*)(?:pub(?:\([\w: ]+\))? )?mod (\w+);")


def sources() -> dict[str, str]:
    """Return each Rust file by its path below crates/, without comments."""
    files = sorted(path for path in CRATES.rglob("*.rs") if "target" not in path.parts)
    texts = {str(path.relative_to(CRATES)): path.read_text("utf-8") for path in files}
    return {name: re.sub(r"//.*", "", text) for name, text in texts.items()}


def rows() -> list[list[str]]:
    """Return the cells of each row of the tables."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def listed() -> list[str]:
    return [cells[0].strip("`") for cells in rows()]


def test_the_page_lists_exactly_the_files_with_unsafe_code() -> None:
    used = {name for name, text in sources().items() if UNSAFE.search(text)}
    names = listed()
    assert len(names) == len(set(names)), "a file has two rows"
    assert used - set(names) == set(), "add a row with the invariant to docs/project/unsafe.md"
    assert set(names) - used == set(), (
        "remove these rows of docs/project/unsafe.md: the files have no unsafe code"
    )


def test_every_row_states_why_the_code_is_sound() -> None:
    for file, *cells in rows():
        assert len(cells) == (1 if "/tests/" in file else 3), file
        assert all(cells), file


def test_an_allowance_covers_one_file() -> None:
    """A child of a file that may use `unsafe` has its own row or denies it at its `mod` line."""
    texts, rows = sources(), set(listed())
    wide = []
    for name, text in texts.items():
        if "#![allow(unsafe_code" not in text or "/tests/" in name:
            continue
        for match in CHILD.finditer(text):
            path = Path(name)
            folder = path.parent if path.stem in ("lib", "main", "mod") else path.with_suffix("")
            children = {str(folder / f"{match[2]}.rs"), str(folder / match[2] / "mod.rs")}
            if not children & rows and "deny(unsafe_code)" not in match[1]:
                wide.append(f"{name}: {match[2]}")
    assert not wide, (
        f"give each its own row in docs/project/unsafe.md, or deny unsafe_code at its `mod` line: {wide}"
    )


def test_every_allowance_is_used() -> None:
    """A module without unsafe code does not allow it."""
    idle = []
    for name, text in sources().items():
        folder = Path(name).parent
        for match in ALLOWANCE.finditer(text):
            module = folder / match[1] if match[1] else Path(name).with_suffix("")
            if not any(Path(file).is_relative_to(module) or file == f"{module}.rs" for file in listed()):
                idle.append(f"{name}: {module}")
    assert not idle, idle


def test_paths_named_on_the_page_exist() -> None:
    names = re.findall(r"`((?:llaisys-\w+|tests)/[\w./]+\.\w+)`", PAGE.read_text("utf-8"))
    missing = [name for name in names if not (CRATES / name).exists() and not (ROOT / name).exists()]
    assert len(names) > 30
    assert not missing, missing
