"""Mutation testing of the cells' bookkeeping: each named mutant of `kv/`, `seq` and `books` must fail one of
their tests.

The files and their tests are copied into a small crate of the same name, so that a mutant builds in seconds.
A mutant is a place in a file (found exactly once) and what stands there instead. Exit code 1: one
survived, or is not found.

    python benches/mutants_core.py [--out benches/results/mutants-rust.txt] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "crates" / "llaisys-core"
SOURCES = ["batch.rs", "books.rs", "dtype.rs", "error.rs", "kv", "seq.rs", "tensor.rs"]
TESTS = ["exhaustive", "books", "reserve_model", "seq_pool", "cells_model"]  # quick to build first
HELPERS = ["kv_model", "seeded"]
MANIFEST = """
[package]
name = "llaisys-core"
version = "0.0.0"
edition = "2024"

[features]
faults = []

[dependencies]
half = "2.7"
serde = { version = "1", features = ["derive"] }
thiserror = "2"

[dev-dependencies]
proptest = { version = "1.12", default-features = false, features = ["std"] }

[profile.dev]
opt-level = 1
debug = 0

[workspace]
"""
# The errors that `error.rs` gathers from rooms that are not here.
LIB = """
pub mod batch;
pub mod books;
pub mod dtype;
pub mod error;
pub mod kv;
pub mod seq;
pub mod tensor;
pub use error::{Error, Result};
pub mod formats {
    #[derive(Debug, thiserror::Error)]
    #[error("format")]
    pub struct FormatError;
}
pub mod sample {
    #[derive(Debug, thiserror::Error)]
    #[error("sampling")]
    pub struct SamplingError;
}
"""
SECONDS_MAX = 300  # a mutant that loops for ever is caught too

# name: (file, what stands there, what stands there instead)
MUTANTS: dict[str, tuple[str, str, str]] = {
    "summary bits never set": ("kv/free.rs", "if *word != u64::MAX {", "if true {"),
    "summary bits never cleared": ("kv/free.rs", "if !was_full {", "if true {"),
    "lowest clear bit from the wrong end": ("kv/free.rs", "word.trailing_ones()", "word.leading_ones()"),
    "taking does not count": ("kv/free.rs", "self.n_free -= 1;", ""),
    "giving back does not count": ("kv/free.rs", "self.n_free += 1;", ""),
    "giving back leaves the bit": ("kv/free.rs", "self.used.clear(cell);", ""),
    "blocks are never touched": ("kv/free.rs", "self.touched.set(cell / BLOCK_CELLS);", ""),
    "blocks stay touched": ("kv/free.rs", "self.touched.clear(block);", ""),
    "runs grow into used blocks": ("kv/free.rs", "(!next.is_multiple_of(BLOCK_CELLS) || ", "(true || "),
    "runs grow over used cells": ("kv/free.rs", "|| self.used.get(next) {", "{"),
    "the stack is a queue": ("kv/free.rs", "stack.push(cell)", "stack.insert(0, cell)"),
    "the stack starts at the end": (
        "kv/free.rs",
        "(base..base + n).rev().collect()",
        "(base..base + n).collect()",
    ),
    "arenas lend the first one's cells": ("kv/free.rs", "Some(self.base + u32", "Some(u32"),
    "retained cells are freed": ("kv/table.rs", "if self.is_retained(cell) || ", "if "),
    "only 64 sequences count": ("kv/table.rs", ".iter().any(|word| *word != 0)", "[0] != 0"),
    "a freed cell keeps its position": ("kv/table.rs", "self.position[cell as usize] = 0;", ""),
    "one retained bit a word": ("kv/table.rs", "|= 1 << (cell % 64)", "|= 1"),
    "a cell is retained for ever": ("kv/table.rs", "&= !(1 << (cell % 64));", "&= u64::MAX;"),
    "every cell is in arena 0": ("kv/table.rs", "cell / self.per_arena", "0 * cell"),
    "a link replaces the others": ("kv/table.rs", "64] |= 1 << (slot % 64);", "64] = 1 << (slot % 64);"),
    "runs join whatever the cells": ("kv/runs.rs", "&& self.cells().end == next.cell", ""),
    "a range may end early": ("kv/runs.rs", "if next == hi { Ok", "if next <= hi { Ok"),
    "a range may have gaps": ("kv/runs.rs", "if piece.position != next {", "if false {"),
    "an empty range touches": ("kv/runs.rs", "let end = if lo < hi {", "let end = if lo <= hi {"),
    "no join in front": ("kv/runs.rs", "self.join(at);", ""),
    "no join behind": ("kv/runs.rs", "self.join(after);", ""),
    "empty runs stay": ("kv/runs.rs", "if last.len == 0 {", "if false {"),
    "a shift may overlap": ("kv/runs.rs", "> next.position\n", "> next.position + 1\n"),
    "a segment's cells can be shifted": ("kv/cells.rs", " || self.table.is_retained(cell)", ""),
    "shared cells can be shifted": ("kv/cells.rs", "self.table.n_seqs(cell) > 1 || ", ""),
    "arenas share without a copy": ("kv/cells.rs", "if stream == home {", "if true {"),
    "copies are not counted": ("kv/cells.rs", "self.check_room(home, from.len())?;", ""),
    "copies do not lie together": ("kv/cells.rs", "last = Some(cell);", ""),
    "keep forgets all": ("kv/cells.rs", ".filter(|(other, _)| *other != slot)", ".filter(|_| true)"),
    "one cell is always left": ("kv/cells.rs", "if needed > free {", "if needed >= free {"),
    "one arena too many": ("kv/cells.rs", "(stream as usize) < n_streams", "(stream as usize) <= n_streams"),
    "copies overwrite": (
        "kv/cells.rs",
        ".pieces(lo, hi).next() {",
        ".pieces(lo, hi).next().filter(|_| false) {",
    ),
    "sequences move with their cells": (
        "kv/cells.rs",
        "if let Some(position) = self.index[slot as usize].start() {",
        "if let Some(position) = self.index[slot as usize].start().filter(|_| false) {",
    ),
    "two segments hold a cell": (
        "kv/segments.rs",
        "cells().find(|&cell| self.table.is_retained(cell))",
        "cells().find(|_| false)",
    ),
    "attach leaves a gap": ("kv/segments.rs", "if p0 != expected {", "if p0 < expected {"),
    "a split leaves nothing": ("kv/segments.rs", "at <= start || at >= end", "at < start || at >= end"),
    "a split gives nothing": ("kv/segments.rs", "at <= start || at >= end", "at <= start || at > end"),
    "a split into a known segment": ("kv/segments.rs", "self.check_new(tail)?;", ""),
    "an empty segment stays": ("kv/segments.rs", "if at == start {", "if false {"),
    "trimmed cells stay retained": ("kv/segments.rs", "self.table.let_go(cell);", "let _ = cell;"),
    "a trim past the end": ("kv/segments.rs", "if at < start || at > end {", "if at < start {"),
    "a created segment is not counted": ("kv/segments.rs", "self.check_room(stream, n)?;", ""),
    "a created segment holds nothing": (
        "kv/segments.rs",
        "self.table.retain(cell);\n            runs",
        "runs",
    ),
    "negative positions in segments": ("kv/segments.rs", "if 0 <= p0 && p0 < p1", "if p0 < p1"),
    "empty segments": ("kv/segments.rs", "0 <= p0 && p0 < p1", "0 <= p0 && p0 <= p1"),
    "every row counts in every arena": ("kv/reserve.rs", "home(row) == stream", "home(row) <= stream"),
    "arenas are coupled": ("kv/reserve.rs", "self.streams[a] == self.streams[b]", "true"),
    "rows after a faulty one stay": (
        "kv/reserve.rs",
        "lost_slots[slot as usize] = culprit",
        "lost_slots[slot as usize] = None",
    ),
    "a dropped reservation stays": (
        "kv/reserve.rs",
        "unplace(self.cells, cell);\n        }",
        "let _ = cell;\n        }",
    ),
    "a rollback keeps the runs": ("kv/reserve.rs", "index[slot as usize].pop();", ""),
    "rows may leave gaps": (
        "kv/reserve.rs",
        "filter(|next| *next != position)",
        "filter(|next| *next > position)",
    ),
    "a sequence twice in a row": ("kv/reserve.rs", "if mark.last_row == last_row {", "if false {"),
    "a forgotten reservation": ("kv/reserve.rs", "assert!(self.placed.is_empty()", "assert!(true"),
    "generations stand still": ("seq.rs", "wrapping_add(1)", "wrapping_add(0)"),
    "a released slot stays lent": ("seq.rs", "self.lent[slot] = false;", ""),
    "two releases": ("seq.rs", "        self.check_lent(id)?;\n        let slot", "        let slot"),
    "old leases pass": ("seq.rs", "&& self.generations[slot] == id.generation", ""),
    "last in, first out": ("seq.rs", "if self.lifo {", "if !self.lifo {"),
    "lent slots are not marked": ("seq.rs", "self.lent[usize::from(slot)] = true;", ""),
    "release keeps the cells": ("books.rs", "self.cells.seq_rm(id.slot(), -1, -1)?;\n        self", "self"),
    "release keeps the arena": ("books.rs", "self.cells.set_stream(id.slot(), 0)?;", ""),
    "every lease in arena 0": ("books.rs", "self.cells.set_stream(id.slot(), stream)?;", ""),
    "a refused lease is lent": ("books.rs", "self.cells.n_free_in(stream)?;", ""),
    "stale rows": ("books.rs", "for &id in &batch.seqs {\n            self.check_lent(id)?;\n        }", ""),
    "the digest forgets leases": ("books.rs", "self.seqs.lent().for_each(|id| id.hash(&mut hasher));", ""),
}


def crate(folder: Path) -> None:
    """The small crate, unchanged."""
    (folder / "Cargo.toml").write_text(MANIFEST)
    shutil.copy(ROOT / "Cargo.lock", folder / "Cargo.lock")
    for kind, names in (("src", SOURCES), ("tests", [*(f"{test}.rs" for test in TESTS), *HELPERS])):
        (folder / kind).mkdir()
        for name in names:
            source = CORE / kind / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / kind / name)
    (folder / "src" / "lib.rs").write_text(LIB)


def cargo(folder: Path, *arguments: str) -> bool:
    """True if it succeeds in time."""
    command = ["cargo", "test", "--offline", "--quiet", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def failing(folder: Path) -> str | None:
    """The first test that fails, or `build`."""
    for test in TESTS:
        if not cargo(folder, "--no-run", "--test", test):
            return "build"
        if not cargo(folder, "--test", test):
            return test
    return None


def verdict(folder: Path, name: str) -> str:
    """`caught by ...`, `SURVIVED`, or why it is no mutant."""
    file, old, new = MUTANTS[name]
    path = folder / "src" / file
    text = path.read_text("utf-8")
    if text.count(old) != 1:
        return f"NOT FOUND ({text.count(old)} times)"
    path.write_text(text.replace(old, new))
    try:
        test = failing(folder)
    finally:
        path.write_text(text)
    if test == "build":
        return "DOES NOT BUILD"
    return "SURVIVED" if test is None else f"caught by {test}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(MUTANTS), default=list(MUTANTS))
    arguments = parser.parse_args()
    lines: list[str] = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        crate(folder)
        if (test := failing(folder)) is not None:
            print(f"{test} fails without a mutant")
            return 1
        for mutant in arguments.only:
            lines.append(f"{verdict(folder, mutant):24} {MUTANTS[mutant][0]:16} {mutant}")
            print(lines[-1], flush=True)
    n_caught = sum(line.startswith("caught") for line in lines)
    lines.append(f"{n_caught} of {len(arguments.only)} caught in {time.monotonic() - start:.0f} s")
    print(lines[-1])
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    return 0 if n_caught == len(arguments.only) else 1


if __name__ == "__main__":
    raise SystemExit(main())
