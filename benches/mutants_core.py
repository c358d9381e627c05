"""Mutation testing of the KV cache: each named mutant of `kv/` must fail one of its tests.

The files and their tests are copied into a small crate of the same name, so that a mutant builds in seconds.
A mutant is a text that occurs exactly once in a file, and its replacement. Exit code 1: a mutant survived, or
its text was not found.

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
SOURCES = ["batch.rs", "dtype.rs", "error", "error.rs", "kv", "seq.rs", "tensor.rs"]
TEST_FOLDERS = ["kv", "seeded"]
TESTS = ["exhaustive", "kv_cache", "reserve", "seq_ids", "cells"]  # modules of the test `kv`
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
# Stubs of the errors that `error.rs` imports from modules outside the small crate.
LIB = """
pub mod batch;
pub mod dtype;
pub mod error;
pub mod kv;
pub mod seq;
pub mod tensor;
pub use error::{Error, Result};
pub mod sample {
    #[derive(Debug, thiserror::Error)]
    #[error("sampling")]
    pub struct SamplingError;
}
"""
SECONDS_MAX = 300  # a mutant that loops forever counts as caught

# name: (file, original text, replacement)
MUTANTS: dict[str, tuple[str, str, str]] = {
    "summary bits never set": ("kv/free.rs", "if *word != u64::MAX {", "if true {"),
    "summary bits never cleared": ("kv/free.rs", "if !was_full {", "if true {"),
    "lowest clear bit from the wrong end": ("kv/free.rs", "word.trailing_ones()", "word.leading_ones()"),
    "allocating does not count": ("kv/free.rs", "self.n_free -= 1;", ""),
    "freeing does not count": ("kv/free.rs", "self.n_free += 1;", ""),
    "freeing leaves the bit": ("kv/free.rs", "self.used.clear(cell);", ""),
    "blocks are never touched": ("kv/free.rs", "self.touched.set(cell / BLOCK_CELLS);", ""),
    "blocks stay touched": ("kv/free.rs", "self.touched.clear(block);", ""),
    "ranges grow into used blocks": ("kv/free.rs", "(!next.is_multiple_of(BLOCK_CELLS) || ", "(true || "),
    "ranges grow over used cells": ("kv/free.rs", "|| self.used.get(next) {", "{"),
    "the stack is a queue": ("kv/free.rs", "stack.push(cell)", "stack.insert(0, cell)"),
    "the stack starts at the end": (
        "kv/free.rs",
        "(base..base + n).rev().collect()",
        "(base..base + n).collect()",
    ),
    "streams allocate the first one's cells": ("kv/free.rs", "Some(self.base + u32", "Some(u32"),
    "cached cells are freed": ("kv/cells.rs", "if self.is_cached(cell) || ", "if "),
    "only 64 sequences count": ("kv/cells.rs", ".iter().any(|word| *word != 0)", "[0] != 0"),
    "a freed cell keeps its position": ("kv/cells.rs", "self.position[cell as usize] = 0;", ""),
    "one cached bit per word": ("kv/cells.rs", "|= 1 << (cell % 64)", "|= 1"),
    "a cell is cached forever": ("kv/cells.rs", "&= !(1 << (cell % 64));", "&= u64::MAX;"),
    "every cell is in stream 0": ("kv/cells.rs", "cell / self.stream_len", "0 * cell"),
    "a link replaces the others": ("kv/cells.rs", "64] |= 1 << (slot % 64);", "64] = 1 << (slot % 64);"),
    "ranges join whatever the cells": ("kv/ranges.rs", "&& self.cells().end == next.cell", ""),
    "a range may end early": ("kv/ranges.rs", "if next == hi { Ok", "if next <= hi { Ok"),
    "a range may have gaps": ("kv/ranges.rs", "if piece.position != next {", "if false {"),
    "an empty range touches": ("kv/ranges.rs", "let end = if lo < hi {", "let end = if lo <= hi {"),
    "no join in front": ("kv/ranges.rs", "self.join(at);", ""),
    "no join behind": ("kv/ranges.rs", "self.join(after);", ""),
    "empty ranges stay": ("kv/ranges.rs", "if last.len == 0 {", "if false {"),
    "a shift may overlap": ("kv/ranges.rs", "> next.position\n", "> next.position + 1\n"),
    "a node's cells can be shifted": ("kv/mod.rs", " || self.cells.is_cached(cell)", ""),
    "shared cells can be shifted": ("kv/mod.rs", "self.cells.n_seqs(cell) > 1 || ", ""),
    "streams share without a copy": ("kv/mod.rs", "if stream == own_stream {", "if true {"),
    "copies are not counted": ("kv/mod.rs", "self.check_free(own_stream, from.len())?;", ""),
    "copies do not lie together": ("kv/mod.rs", "last = Some(cell);", ""),
    "keep forgets all": ("kv/mod.rs", ".filter(|(other, _)| *other != slot)", ".filter(|_| true)"),
    "one cell is always left": ("kv/mod.rs", "if needed > free {", "if needed >= free {"),
    "one stream too many": ("kv/mod.rs", "(stream as usize) < n_streams", "(stream as usize) <= n_streams"),
    "copies overwrite": (
        "kv/mod.rs",
        ".pieces(lo, hi).next() {",
        ".pieces(lo, hi).next().filter(|_| false) {",
    ),
    "two nodes cache a cell": (
        "kv/nodes.rs",
        "cells().find(|&cell| self.cells.is_cached(cell))",
        "cells().find(|_| false)",
    ),
    "attach leaves a gap": ("kv/nodes.rs", "if p0 != expected {", "if p0 < expected {"),
    "a split leaves nothing": ("kv/nodes.rs", "at <= start || at >= end", "at < start || at >= end"),
    "a split gives nothing": ("kv/nodes.rs", "at <= start || at >= end", "at <= start || at > end"),
    "a split into an existing node": ("kv/nodes.rs", "self.check_new(tail)?;", ""),
    "an empty node stays": ("kv/nodes.rs", "if at == start {", "if false {"),
    "trimmed cells stay cached": ("kv/nodes.rs", "self.cells.release(cell);", "let _ = cell;"),
    "a trim past the end": ("kv/nodes.rs", "if at < start || at > end {", "if at < start {"),
    "a created node is not counted": ("kv/nodes.rs", "self.check_free(stream, n)?;", ""),
    "a created node caches nothing": (
        "kv/nodes.rs",
        "self.cells.cache(cell);\n            ranges",
        "ranges",
    ),
    "negative positions in nodes": ("kv/nodes.rs", "if 0 <= p0 && p0 < p1", "if p0 < p1"),
    "empty nodes": ("kv/nodes.rs", "0 <= p0 && p0 < p1", "0 <= p0 && p0 <= p1"),
    "rows count in every stream": ("kv/reserve.rs", "stream_of(row) == stream", "stream_of(row) <= stream"),
    "streams are coupled": ("kv/reserve.rs", "self.streams[a] == self.streams[b]", "true"),
    "rows after a faulty one stay": (
        "kv/reserve.rs",
        "fault_of_slot[slot] = culprit",
        "fault_of_slot[slot] = None",
    ),
    "a dropped reservation stays": (
        "kv/reserve.rs",
        "self.kv.free_row(cell);\n        }",
        "let _ = cell;\n        }",
    ),
    "a rollback keeps the ranges": ("kv/reserve.rs", "self.index[slot].pop();", ""),
    "rows may leave gaps": (
        "kv/reserve.rs",
        "filter(|next| *next != position)",
        "filter(|next| *next > position)",
    ),
    "a sequence twice in a row": ("kv/reserve.rs", "if mark.last_row == last_row {", "if false {"),
    "a forgotten reservation": ("kv/reserve.rs", "assert!(self.reserved.is_empty()", "assert!(true"),
    "generations stand still": ("kv/seq_pool.rs", "wrapping_add(1)", "wrapping_add(0)"),
    "a released slot stays acquired": ("kv/seq_pool.rs", "self.is_acquired[slot] = false;", ""),
    "two releases": ("kv/seq_pool.rs", "self.is_acquired.get(slot) == Some(&true) && ", ""),
    "old ids pass": ("kv/seq_pool.rs", "&& self.generations[slot] == id.generation()", ""),
    "last in, first out": ("kv/seq_pool.rs", "if self.lifo {", "if !self.lifo {"),
    "acquired slots are not marked": ("kv/seq_pool.rs", "self.is_acquired[usize::from(slot)] = true;", ""),
    "release keeps the cells": ("kv/mod.rs", "self.remove(slot, 0, i32::MAX);", ""),
    "release keeps the stream": ("kv/mod.rs", "self.streams[slot] = 0;", ""),
    "every id in stream 0": ("kv/mod.rs", "self.streams[id.slot() as usize] = stream;", ""),
    "a rejected id is acquired": ("kv/mod.rs", "self.check_stream(stream)?;\n        let id", "let id"),
    "stale rows": ("kv/reserve.rs", "self.acquired(id)?;", ""),
    "the digest omits ids": ("kv/check.rs", "self.seqs.acquired().for_each(|id| id.hash(&mut hasher));", ""),
}


def crate(folder: Path) -> None:
    """Create the small crate without a mutant."""
    (folder / "Cargo.toml").write_text(MANIFEST)
    shutil.copy(ROOT / "Cargo.lock", folder / "Cargo.lock")
    for kind, names in (("src", SOURCES), ("tests", TEST_FOLDERS)):
        (folder / kind).mkdir()
        for name in names:
            source = CORE / kind / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / kind / name)
    (folder / "src" / "lib.rs").write_text(LIB)


def cargo(folder: Path, *arguments: str) -> bool:
    """Run cargo; return True if it succeeds in time."""
    command = ["cargo", "test", "--offline", "--quiet", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def failing(folder: Path) -> str | None:
    """Return the first test module that fails, `build`, or None."""
    if not cargo(folder, "--no-run", "--test", "kv"):
        return "build"
    for test in TESTS:
        if not cargo(folder, "--test", "kv", f"{test}::"):
            return test
    return None


def result(folder: Path, name: str) -> str:
    """Return `caught by ...`, `SURVIVED`, or why the mutant is invalid."""
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
            lines.append(f"{result(folder, mutant):24} {MUTANTS[mutant][0]:16} {mutant}")
            print(lines[-1], flush=True)
    n_caught = sum(line.startswith("caught") for line in lines)
    lines.append(f"{n_caught} of {len(arguments.only)} caught in {time.monotonic() - start:.0f} s")
    print(lines[-1])
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    return 0 if n_caught == len(arguments.only) else 1


if __name__ == "__main__":
    raise SystemExit(main())
