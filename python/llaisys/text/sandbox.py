"""Jinja2 as transformers sets it up for chat templates, with a limit on the work of one render.

The sandbox keeps a template from code and files, but not from work: two nested loops of 100,000 turns are 80
characters. So each turn of a loop, each call and each item that a filter is given takes fuel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

FUEL = 500_000
# A call takes about as long as so many turns of a loop.
_CALL = 4
# A name that no template can write.
_COUNTED = " counted"
_fuel: ContextVar[list[int]] = ContextVar("fuel")


class FuelledEnvironment(ImmutableSandboxedEnvironment):
    """Templates of this environment render inside `fuelled()` only, and fail with a TemplateError when it is
    used up."""

    # What makes much of little is not worked out when a template is compiled, which nothing bounds.
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.filters[_COUNTED] = _counted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = self._count(loop.iter)
        for filtered in list(tree.find_all(nodes.Filter)):
            if filtered.name != _COUNTED and filtered.node is not None:
                filtered.node = self._count(filtered.node)
        return tree

    def _count(self, node: nodes.Node) -> nodes.Filter:
        counted = nodes.Filter(node, _COUNTED, [], [], None, None)
        counted.set_lineno(node.lineno).set_environment(self)
        return counted

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As in Jinja's sandbox."""
        _burn(_CALL)
        return super().call(context, obj, *args, **kwargs)


@contextmanager
def fuelled() -> Iterator[None]:
    """Fuel for one render, on this thread."""
    token = _fuel.set([FUEL])
    try:
        yield
    finally:
        _fuel.reset(token)


def _burn(n: int) -> None:
    left = _fuel.get()
    left[0] -= n
    if left[0] < 0:
        raise jinja2.TemplateError(f"it takes more than {FUEL} steps")


@pass_context  # so that Jinja does not work it out once, when it compiles
def _counted(_: Context, value: Any) -> Any:
    """The value; its items cost fuel, now if they are there and as they come if not. Text is one item."""
    if isinstance(value, str | jinja2.Undefined) or not hasattr(value, "__iter__"):
        _burn(1)
        return value
    if isinstance(value, Sized):
        _burn(1 + len(value))
        return value
    return _counted_items(value)


def _counted_items(items: Any) -> Iterator[Any]:
    for item in items:
        _burn(1)
        yield item
