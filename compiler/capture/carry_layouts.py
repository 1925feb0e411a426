"""Carries, and rows of other loops, lie in memory as they do in the user's program, where a step can tell.

Between segments a carry is contiguous. In the user's program it lies as the step before left it, a transposed one for
example, and that can be told: random numbers are drawn in the order of memory, and a ``view`` wants a layout that it
can look at. So a step begins by giving its carries the layout that they have there. The first steps may find another
one, that of the initial values: where the step can tell they are taken off, and stay outside of the loop. Rows that
another loop gave, and weights of blocks, are read from contiguous memory, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from reroll.capture.rows.hoist import copy_with_examples
from reroll.capture.rows.peel import peel
from reroll.errors import CaptureError
from reroll.graph.effects import example, spelled
from reroll.graph.fakes import fake_of, new_fake_mode, outside_dynamo
from reroll.graph.layouts import Order, is_plain, lay_out, memory_order
from reroll.graph.private import is_higher_order, is_of_users, storage_id
from reroll.recurrence import Recurrence

Layouts = tuple[Order, ...]
"""The order of memory of each tensor of a carry."""


def keep_layouts(outer: fx.Graph, recurrences: Sequence[Recurrence]) -> tuple[fx.Graph, list[Recurrence]]:
    """The graph and its recurrences with steps that begin by laying out their carries as the user's program does.

    Raises CaptureError for a loop whose layouts never settle and whose step can tell, or that looks past a carry in
    memory.
    """
    recurrences = [_read_as_before(each) if _may_tell(each) else each for each in recurrences]
    found = {each.name: _layouts(outer, each) for each in recurrences}
    if all(len(layouts) == 1 and all(map(is_plain, layouts[0])) for layouts in found.values()):
        return outer, list(recurrences)
    graph, kept = copy_with_examples(outer), []
    for each in recurrences:
        *first, settled = found[each.name]
        if first and _may_tell(each):
            call = next(node for node in graph.nodes if node.target == each.name)
            each = peel(graph, call, each, len(first), 0)
        kept.append(replace(each, step=_begun(each.step, 0, settled)))
    graph.lint()
    return graph, kept


def _read_as_before(recurrence: Recurrence) -> Recurrence:
    """The recurrence with a step that begins by laying out what it reads at each step as the user's program has it."""
    _, xs, _ = recurrence.inputs
    read = recurrence.read_first(recurrence.examples, row=0)[: len(xs)]
    before = [given if (value := example(x)) is None else value for x, given in zip(xs, read, strict=True)]
    layouts = tuple(map(memory_order, before))
    if layouts == tuple(map(memory_order, read)):
        return recurrence
    return replace(recurrence, step=_begun(recurrence.step, len(recurrence.carries), layouts))


def _layouts(outer: fx.Graph, recurrence: Recurrence) -> list[Layouts]:
    """The layouts of the carry before each of the first steps, until they stay the same.

    Where they never do and no operation can tell, carries are contiguous.
    """
    call = next(node for node in outer.nodes if node.target == recurrence.name)
    carried = len(recurrence.carries)
    initial = [example(node) for node in call.args[:carried]]
    values = [like if given is None else given for given, like in zip(initial, recurrence.examples, strict=False)]
    found = [tuple(map(memory_order, values))]
    if all(map(is_plain, found[0])) and _is_plain_step(recurrence):
        return found
    mode = new_fake_mode()
    with outside_dynamo(mode), recurrence.modes():
        carries = [fake_of(mode, value) for value in values]
        operands = [fake_of(mode, value) for value in recurrence.examples]
        for _ in range(carried + 2):
            with mode:
                carries = _stepped(recurrence, carries, operands)
            found.append(tuple(map(memory_order, carries)))
            if found[-1] == found[-2]:
                return found[:-1]
    if _may_tell(recurrence):
        raise CaptureError(
            f"the carry of the loop at {recurrence.where} lies in memory in another way at every step, which random "
            "numbers, as_strided and operators of one's own can tell; give it one layout with .contiguous() at the end "
            "of the step"
        )
    return [tuple(tuple(range(value.dim())) for value in carries)]


def _may_tell(recurrence: Recurrence) -> bool:
    """Whether what a step gives may depend on the layouts of its carries."""
    graphs = [each.graph for each in recurrence.step.modules() if isinstance(each, fx.GraphModule)]
    return recurrence.random or any(map(_looks_at_memory, (node for graph in graphs for node in graph.nodes)))


def _looks_at_memory(node: fx.Node) -> bool:
    """Whether an operation may read numbers in the order of memory: as_strided, and what is not of torch's own."""
    if _is_strided(node) or node.op == "call_module" or "as_strided" in str(node.args):
        return True
    return is_of_users(node.target) or (is_higher_order(node.target) and "triton" in str(node.target))


def _is_plain_step(recurrence: Recurrence) -> bool:
    """Whether it is known without a run that a step gives contiguous carries, and looks at no memory but its own."""
    graph = recurrence.step.graph
    results: Any = graph.output_node().args[0]
    ends = [example(node) for node in results[: len(recurrence.carries)]]
    starts = [example(node) for node in recurrence.inputs[0]]
    plain = all(value is not None and is_plain(memory_order(value)) for value in (*starts, *ends))
    return plain and not any(map(_is_strided, graph.nodes))


def _is_strided(node: fx.Node) -> bool:
    return spelled(node) == "as_strided"


class _Stepping(fx.Interpreter):
    """Runs a step, and sees whether it looks past a carry, or what is read at each step, in memory."""

    def __init__(self, recurrence: Recurrence, lent: Sequence[torch.Tensor]) -> None:
        super().__init__(recurrence.step)
        self.where, self.lent = recurrence.where, {storage_id(each) for each in lent}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node. Raises CaptureError for ``as_strided`` of what is not the step's own."""
        if _is_strided(n):
            source, *_ = self.fetch_args_kwargs_from_env(n)[0]
            if storage_id(source) in self.lent:
                raise CaptureError(
                    f"the step at {self.where} takes as_strided of a value that it is given, whose memory is another "
                    "one here; take it of a copy (.clone()), or use view, transpose, narrow or unfold"
                )
        return super().run_node(n)


def _stepped(recurrence: Recurrence, carries: list[torch.Tensor], operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The next carries."""
    given = recurrence.read_first(operands)
    results = _Stepping(recurrence, [*carries, *given[: len(recurrence.xs)]]).run(*carries, *given)
    return [result.detach() for result in results[: len(carries)]]


def _begun(step: fx.GraphModule, first: int, layouts: Layouts) -> fx.GraphModule:
    """A step that lays out its inputs from the ``first`` on before all else."""
    if all(map(is_plain, layouts)):
        return step
    graph = fx.Graph()
    result = graph.graph_copy(step.graph, {})
    graph.output(result)
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_before(inputs[-1].next):
        for node, order in zip(inputs[first:], layouts, strict=False):
            if not is_plain(order):
                users = list(node.users)
                made = lay_out(graph, node, order)
                for user in users:
                    user.replace_input_with(node, made)
    graph.lint()
    return fx.GraphModule(step, graph)
