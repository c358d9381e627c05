"""No Rust function has a destructured tuple parameter; parameters that belong together are a named struct."""

from __future__ import annotations

import re
from pathlib import Path

CRATES = Path(__file__).parents[2] / "crates"
FUNCTION = re.compile(r"\bfn\s+\w+\s*(?=[<(])")
# `(a, b): (X, Y)`, also with `&` and `mut`, at the start of a parameter.
TUPLE = re.compile(r"(?:^|,)\s*&?\s*(\([^()]*(?:\([^()]*\)[^()]*)*\))\s*:")


def code(path: Path) -> str:
    """Return the text of a Rust file without comments."""
    return re.sub(r"//.*", "", path.read_text("utf-8"))


def parameters(text: str, start: int) -> str:
    """Return what is between the parentheses of the function whose name ends at `start`."""
    depth = 0
    while text[start] != "(" or depth:  # skip generics
        if text[start] == "<":
            depth += 1
        elif text[start] == ">" and text[start - 1] != "-":
            depth -= 1
        start += 1
    end, depth = start, 0
    while True:
        depth += (text[end] == "(") - (text[end] == ")")
        end += 1
        if depth == 0:
            return text[start + 1 : end - 1]


def destructured(text: str) -> list[str]:
    """Return the destructured parameters of every function in a text."""
    found = []
    for function in FUNCTION.finditer(text):
        found += [match[1] for match in TUPLE.finditer(parameters(text, function.end()))]
    return found


def test_no_function_destructures_a_tuple() -> None:
    files = sorted(path for path in CRATES.rglob("*.rs") if "target" not in path.parts)
    found = {str(path.relative_to(CRATES)): destructured(code(path)) for path in files}
    assert len(files) > 100
    assert {name: parameters for name, parameters in found.items() if parameters} == {}, (
        "name these parameters, or make them a struct with named fields"
    )


def test_every_form_is_detected() -> None:
    assert destructured("fn f((a, b): (X, Y)) {}") == ["(a, b)"]
    assert destructured("fn f<T: Fn(u8) -> u8>(&self, x: u8, (a, (b, c)): (X, (Y, Z))) {}") == ["(a, (b, c))"]
    assert destructured("fn f(\n    x: u8,\n    (mut a, b): (u8, u8),\n) {}") == ["(mut a, b)"]
    assert destructured("fn f(x: (u8, u8), g: fn(u8) -> u8) { let h = |(a, b): (u8, u8)| a; }") == []
