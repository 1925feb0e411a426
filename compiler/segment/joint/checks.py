"""Errors for some values of a matrix: a singular one in ``torch.linalg.inv``, one that is not positive in ``cholesky``.

torch calculates, and then looks at what the calculation says of itself (``aten._linalg_check_errors``). That gives
nothing, so a graph would lose it. A segment's first result passes through ``reroll::checked``, which looks at all of
its calculations and raises torch's own error; what else the segment gives is of no use then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from reroll.graph.private import CHECK, Watching

LIBRARY = torch.library.Library("reroll", "FRAGMENT")
LIBRARY.define("checked(Tensor value, Tensor[] told, str names) -> Tensor")
_made_up = ContextVar("values are made up", default=False)


@torch.library.impl(LIBRARY, "checked", "CompositeExplicitAutograd")
def _checked(value: Tensor, told: Sequence[Tensor], names: str) -> Tensor:
    if not _made_up.get():
        for info, name in zip(told, names.split(), strict=True):
            CHECK(info, name, is_matrix=info.dim() == 0)
    return value.clone()


def _fake(value: Tensor, told: Sequence[Tensor], names: str) -> Tensor:
    return torch.empty_like(value)


torch.library.register_fake("reroll::checked", _fake, lib=LIBRARY)


@contextmanager
def values_made_up() -> Iterator[None]:
    """Inside, segments run on numbers that nobody gave, and no error is raised for them."""
    token = _made_up.set(True)
    try:
        yield
    finally:
        _made_up.reset(token)


class Checks(Watching):
    """Notes what is looked at for errors inside, and by whom; looks at nothing, as the values are fake."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.told = list[Tensor]()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not CHECK:
            return func(*args, **(kwargs or {}))
        self.told.append(args[0])
        self.names.append(args[1])
        return None


class Noted:
    """A function with all that is looked at for errors behind its results.

    ``outputs``: how many results it has without these. ``names``: who looks at each; known once it has run.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function, self.outputs, self.names = function, 0, tuple[str, ...]()

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        with Checks() as checks:
            results = self.function(*args)
        self.outputs, self.names = len(results), tuple(checks.names)
        return (*results, *(told.detach() for told in checks.told))

    def pass_through(self, graph: fx.Graph) -> None:
        """In a graph of it, the first result passes through a look at what is behind, which is no result any more."""
        if not self.names:
            return
        end, behind = graph.output_node(), self.outputs + len(self.names)
        results: Any = end.args[0]
        with graph.inserting_before(end):
            told = list(results[self.outputs : behind])
            first = graph.call_function(torch.ops.reroll.checked.default, (results[0], told, " ".join(self.names)))
        first.meta["val"] = results[0].meta["val"]
        end.args = ((first, *results[1 : self.outputs], *results[behind:]),)
        graph.set_codegen(fx.graph.CodeGen())  # that of the trace says how many results there are
