"""The graph of a half, compiled by inductor as it is.

Private torch API, tried on 2.11 and 2.13: ``compile_fx_inner`` (inductor without AOTAutograd around it), ``V`` (whose
fake mode inductor reads), ``user_visible_output_idxs`` (results keep their layout), ``FakeTensorMode``. The pickler of
inductor's cache begins with the table of ``copyreg``.
"""

from __future__ import annotations

import copyreg
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from reroll.backends.inductor.inductor_workarounds import mended
from reroll.backends.inductor.wrapper_codegen.threads import kernel_threads
from reroll.backends.inductor.wrapper_codegen.unit import Unit, quick_builds
from reroll.graph.fakes import outside_dynamo


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """A compiled half: called with a list of operands, which it empties. ``source``: the text of its wrapper;
    ``itemsizes``: bytes of an element of what each operation in it gives, by the operation's name. ``unit``: its
    kernels, which are built when that is settled, or at the first call: what is only weighed is never built."""

    call: Callable[[list[Any]], Sequence[Any]]
    source: str
    itemsizes: Mapping[str, int]
    unit: Unit = field(default_factory=Unit)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """The results."""
        return self.call(inputs)


def compile_half(graph: fx.GraphModule, mode: FakeTensorMode, *, backward: bool, build: bool = True) -> Code:
    """What inductor makes of a graph whose placeholders have examples of ``mode``; the graph is rewritten.

    With ``build=False`` only the text is there: kernels are not built. Raises ValueError if it needs constants then.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    output = graph.graph.output_node()
    results: Any = output.args[0]
    there = [number for number, result in enumerate(results) if result is not None]
    output.meta["user_visible_output_idxs"] = there  # laid out as the backward is compiled for
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    settings: Mapping[str, Any] = {
        "layout_optimization": False,
        "cpp.max_horizontal_fusion_size": 1,
        "cpp.threads": kernel_threads(),
    }
    unit = Unit(partial(mended, settings))
    kernels = quick_builds(build=build, later=unit)
    with (
        outside_dynamo(mode),
        V.set_fake_mode(mode),
        torch.no_grad(),
        kernels,
        mended(settings),
        _one_name_in_all_processes(),
    ):
        compiled: Any = compile_fx_inner(graph, inputs, is_backward=backward)
    if not build and getattr(compiled, "constants", None):
        raise ValueError("inductor made constants of parts of the graph")
    return Code(compiled, getattr(compiled, "source_code", ""), _itemsizes(graph.graph), unit)


@contextmanager
def _one_name_in_all_processes() -> Iterator[None]:
    """Inductor's cache knows a graph by its pickle, and Python pickles a layout of memory as an attribute of the first
    module that has imported torch: where that is a module of the user's, no other process would find the code."""
    table: dict[type, Any] = copyreg.dispatch_table
    kind: type = torch.memory_format
    before = {kind: table[kind]} if kind in table else {}
    table[kind] = lambda layout: (pkgutil.resolve_name, (str(layout),))
    try:
        yield
    finally:
        table.pop(kind, None)
        table.update(before)


def _itemsizes(graph: fx.Graph) -> dict[str, int]:
    """Bytes of an element of the results of each operation; the most, if they differ."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, Tensor):
                found[str(node.target)] = max(found.get(str(node.target), 0), each.dtype.itemsize)
    return found
