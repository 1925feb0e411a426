"""Drop the tapes of the forward, and run each interval again from its kept carry when it is reversed."""

from __future__ import annotations

from torch import fx

from reroll.context import Context
from reroll.instructions import before_turn, operands, position, write_backward, write_run, write_save
from reroll.program import Node, Program, advance, backward, save, tape
from reroll.program import recompute as recompute_instruction
from reroll.registry import register_pass
from reroll.schedule import Interval


@register_pass("recompute")
def recompute(program: Program, context: Context) -> Program:
    """Turn each tape of the forward that is a child of the root, and whose first carry is saved, into an advance.

    Its backward becomes a replay from the saved carry. All other tapes stay, so the program is legal in any order of
    passes; a root without children is left as it is.
    """
    program = program.copy()
    graph = program.graph
    children = {(child.start, child.stop): child for child in context.root.children}
    saved: dict[int, Node] = {}
    for node in list(before_turn(graph)):
        if node.target is save:
            saved[position(node)] = node
        if node.target is not tape:
            continue
        carry, start, stop = operands(node)
        if (start, stop) not in children or start not in saved:
            continue
        with graph.inserting_before(node):
            advanced = write_run(graph, advance, carry, start, stop)
        reversal = next(user for user in node.users if user.target is backward)
        with graph.inserting_before(reversal):
            grad = replay(graph, children[start, stop], saved[start], operands(reversal)[1])
        for old, new in ((reversal, grad), (node, advanced)):
            old.replace_all_uses_with(new)
            graph.erase_node(old)
    return program


def replay(graph: fx.Graph, interval: Interval, kept: Node, grad: Node) -> Node:
    """Write the reversal of an interval from its kept carry; gives the gradient at its start."""
    if not interval.children:
        taped = write_run(graph, tape, kept, interval.start, interval.stop)
        return write_backward(graph, taped, grad)
    carries: list[Node] = []
    carry = kept
    for child in interval.children:
        carries.append(write_save(graph, carry, child.start) if carries else kept)
        carry = write_run(graph, recompute_instruction, carry, child.start, child.stop)
    for child, start in zip(reversed(interval.children), reversed(carries), strict=True):
        grad = replay(graph, child, start, grad)
    return grad
