"""The modules of `llaisys-core` use only the modules listed here, and siblings have no cycle at any level.

Uses between a module and its own parent (`super::Type`) do not count. Seen from outside, a parent and its
children are one module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

Module = tuple[str, ...]

SRC = Path(__file__).parents[2] / "crates" / "llaisys-core" / "src"
# Each top-level module with the top-level modules that it uses.
USES = {
    "arch": {"error", "ops"},
    "batch": {"error", "seq"},
    "collective": {"error"},
    "context": {
        *("arch", "batch", "collective", "dtype", "error", "faults", "forward", "kv", "load", "ops"),
        *("progress", "sample", "seq", "tensor", "threads"),
    },
    "cuda": {
        *("arch", "collective", "context", "dtype", "error", "forward", "kv", "load", "ops", "progress"),
        *("quant", "sample", "seq", "tensor", "threads"),
    },
    "dtype": set(),
    "error": set(),
    "faults": {"error"},
    "forward": {"arch", "dtype", "error", "load", "ops", "progress", "quant", "tensor", "threads"},
    "kv": {"batch", "dtype", "error", "seq", "tensor"},
    "load": {"arch", "dtype", "error", "ops", "quant", "tensor", "threads"},
    "ops": {"collective", "dtype", "error", "quant", "tensor", "threads"},
    "progress": set(),
    "quant": {"dtype", "tensor"},
    "sample": {"error", "ops"},  # `ops` has the vector search for the largest logit
    "seq": set(),
    "tensor": {"dtype", "error"},
    "threads": {"error"},
}


def module_of(path: Path, src: Path) -> Module:
    parts = path.relative_to(src).with_suffix("").parts
    return parts[:-1] if parts[-1] in ("mod", "lib") else parts


def use_paths(tree: str) -> Iterator[Module]:
    """Return the paths of a `use` tree: `a::{b, c::d}` names `a::b` and `a::c::d`."""
    head, brace, rest = tree.strip().partition("{")
    prefix = tuple(part.strip() for part in head.split(" as ")[0].split("::") if part.strip())
    if not brace:
        yield prefix
        return
    depth, item = 0, ""
    for char in rest.rstrip().removesuffix("}") + ",":
        if char == "," and depth == 0:
            if item.strip():
                yield from (prefix + path for path in use_paths(item))
            item = ""
        else:
            depth += (char == "{") - (char == "}")
            item += char


def used_by(module: Module, code: str) -> Iterator[Module]:
    """Return the absolute paths below the crate that the code of `module` names."""
    code = re.sub(r"//.*", "", code)
    paths: list[Module] = []
    for tree in re.findall(r"\buse\s+((?:crate|super|self)::[^;]*);", code):
        paths += use_paths(tree)
    code = re.sub(r"\buse\s+[^;]*;", "", code)
    paths += [tuple(path.split("::")) for path in re.findall(r"\b(?:crate|super)(?:::\w+)+", code)]
    for first, *rest in paths:
        if first == "crate":
            yield tuple(rest)
        elif first == "self":
            yield (*module, *rest)
        else:
            n_up = 1 + next((i for i, part in enumerate(rest) if part != "super"), len(rest))
            yield (*module[: max(len(module) - n_up, 0)], *rest[n_up - 1 :])


def sibling_graphs(src: Path) -> dict[Module, dict[str, set[str]]]:
    """Return, for each module with children, which child uses which other child."""
    files = {module_of(path, src): path.read_text("utf-8") for path in sorted(src.rglob("*.rs"))}
    graphs: dict[Module, dict[str, set[str]]] = {}
    for module, code in files.items():
        for target in used_by(module, code):
            while target and target not in files:
                target = target[:-1]
            shared = 0
            while shared < min(len(module), len(target)) and module[shared] == target[shared]:
                shared += 1
            if shared < min(len(module), len(target)):
                graph = graphs.setdefault(module[:shared], {})
                graph.setdefault(module[shared], set()).add(target[shared])
    return graphs


def test_core_modules_use_exactly_the_listed_modules() -> None:
    modules = {module_of(path, SRC)[0] for path in SRC.rglob("*.rs") if module_of(path, SRC)}
    graph = sibling_graphs(SRC)[()]
    assert modules == USES.keys()
    added = {name: sorted(graph.get(name, set()) - USES[name]) for name in modules}
    assert not any(added.values()), f"a new dependency between modules: avoid it, or add it to USES: {added}"
    unused = {name: sorted(USES[name] - graph.get(name, set())) for name in modules}
    assert not any(unused.values()), f"remove these from USES: {unused}"


def test_sibling_modules_have_no_cycles() -> None:
    cycles = []
    for parent, graph in sibling_graphs(SRC).items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycles.append("::".join(("crate", *parent)) + ": " + " uses ".join(reversed(error.args[1])))
    assert not cycles, cycles


def test_a_cycle_is_detected_at_its_level(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "lib.rs").write_text("mod a; mod b;")
    (tmp_path / "a" / "mod.rs").write_text("mod c; mod d; // use crate::b::B;")
    (tmp_path / "a" / "c.rs").write_text("use super::d::D;\nuse crate::{b::B, a::Own};")
    (tmp_path / "a" / "d.rs").write_text("fn f() -> crate::a::c::C { super::c::f() }")
    (tmp_path / "b.rs").write_text("use std::fmt;")
    assert sibling_graphs(tmp_path) == {(): {"a": {"b"}}, ("a",): {"c": {"d"}, "d": {"c"}}}
