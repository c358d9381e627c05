"""FueledEnvironment: Jinja2's sandbox with a limit on the work of one render.

The sandbox denies a template access to code and files, but does not limit its work: two nested loops of
100,000 iterations take 80 characters. So each loop iteration, call and input item of a filter consumes fuel.
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
# The cost of a call in loop iterations.
_CALL_FUEL = 4
# A filter name that no template can contain.
_COUNTED = " counted"
_fuel: ContextVar[list[int]] = ContextVar("fuel")


class FueledEnvironment(ImmutableSandboxedEnvironment):
    """Templates of this environment render only inside `fueled()`, and raise TemplateError without fuel."""

    # Do not fold these operators at compile time, which has no limit. They make large values from small ones.
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
        """Consume fuel, then call as Jinja's sandbox does."""
        _consume(_CALL_FUEL)
        return super().call(context, obj, *args, **kwargs)


@contextmanager
def fueled() -> Iterator[None]:
    """Provide the fuel of one render in this context."""
    token = _fuel.set([FUEL])
    try:
        yield
    finally:
        _fuel.reset(token)


def _consume(n: int) -> None:
    left = _fuel.get()
    left[0] -= n
    if left[0] < 0:
        raise jinja2.TemplateError(f"it needs more than {FUEL} steps")


@pass_context  # keeps Jinja from folding the filter at compile time
def _counted(_: Context, value: Any) -> Any:
    """Return the value and consume fuel for its items: at once if it is sized, else one by one.

    A text counts as one item.
    """
    if isinstance(value, str | jinja2.Undefined) or not hasattr(value, "__iter__"):
        _consume(1)
        return value
    if isinstance(value, Sized):
        _consume(1 + len(value))
        return value
    return _counted_items(value)


def _counted_items(items: Any) -> Iterator[Any]:
    for item in items:
        _consume(1)
        yield item
