"""Whence gradients may come: what a value depends on, but by whole numbers, comparisons and what is cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from reroll.graph.effects import example, modes, spelled
from reroll.recurrence import Recurrence

_CUTS = ("detach", "detach_")
Inputs = Callable[[fx.Node], Iterable[fx.Node]]


def sources(node: fx.Node, inputs: Inputs = lambda node: node.all_input_nodes) -> set[fx.Node]:
    """A value, and all values to which its gradient flows. ``inputs``: what a node is computed from."""
    found, todo = set[fx.Node](), [node]
    while todo:
        each = todo.pop()
        if each not in found and _differentiable(each):
            found.add(each)
            todo += inputs(each)
    return found


def _differentiable(node: fx.Node) -> bool:
    value = example(node)
    kinds = value is None or value.dtype.is_floating_point or value.dtype.is_complex
    return kinds and spelled(node) not in _CUTS


def one_mode(graph: fx.Graph) -> bool:
    """Whether a graph runs in one gradient mode from its beginning to its end."""
    return len(set(modes(list(graph.nodes)))) == 1


def operands_behind(recurrence: Recurrence, carry: int) -> set[int] | None:
    """The operands to which the gradient of a last carry flows.

    None unless the carry depends on itself: then that of each step before flows to them as well.
    """
    graph = recurrence.step.graph
    results, (carries, xs, constants) = graph.output_node().args[0], recurrence.inputs
    reached, todo = set[fx.Node](), [carry]
    while todo:
        new = sources(results[todo.pop()]) - reached  # type: ignore[index,arg-type]
        reached |= new
        todo += [number for number, each in enumerate(carries) if each in new]
    if carries[carry] not in sources(results[carry]) or not one_mode(graph):  # type: ignore[index,arg-type]
        return None
    places = zip([*carries, *xs, *constants], recurrence.slots(1).operands, strict=True)
    return {each for node, read in places if node in reached for each in read}
