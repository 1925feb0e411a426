"""Drop the tapes of the forward, and run each interval again from its kept carry when it is reversed."""

from __future__ import annotations

from dataclasses import replace

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
    graph = fx.Graph()
    children = {(child.start, child.stop): child for child in context.root.children}
    forward = set(before_turn(program.graph))
    copies: dict[Node, Node] = {}
    saved: dict[int, Node] = {}
    dropped: dict[Node, Interval] = {}
    for node in program.graph.nodes:
        args = fx.map_arg(operands(node), copies.__getitem__)
        if node.target is tape and node in forward and args[1:] in children and args[1] in saved:
            dropped[node] = children[args[1:]]
            copies[node] = write_run(graph, advance, *args)
        elif node.target is backward and operands(node)[0] in dropped:
            interval = dropped[operands(node)[0]]
            copies[node] = replay(graph, interval, saved[interval.start], args[1])
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.target is save and node in forward:
            saved[position(node)] = copies[node]
    return replace(program, graph=graph)


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
