"""To which operands of a loop the gradients of its last carries flow."""

from __future__ import annotations

from torch import fx

from reroll.graph.effects import gradient_sources, modes
from reroll.recurrence import Recurrence


def one_mode(graph: fx.Graph) -> bool:
    """Whether a graph runs in one gradient mode from its beginning to its end."""
    return len(set(modes(list(graph.nodes)))) == 1


def reached_operands(recurrence: Recurrence, carry: int) -> set[int] | None:
    """The operands to which the gradient of a last carry flows.

    None unless the carry depends on itself: then that of each step before flows to them as well.
    """
    graph = recurrence.step.graph
    results, (carries, xs, constants) = graph.output_node().args[0], recurrence.inputs
    reached, todo = set[fx.Node](), [carry]
    while todo:
        new = gradient_sources(results[todo.pop()]) - reached  # type: ignore[index,arg-type]
        reached |= new
        todo += [number for number, each in enumerate(carries) if each in new]
    if carries[carry] not in gradient_sources(results[carry]) or not one_mode(graph):  # type: ignore[index,arg-type]
        return None
    places = zip([*carries, *xs, *constants], recurrence.slots(1).operands, strict=True)
    return {each for node, read in places if node in reached for each in read}
