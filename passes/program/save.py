"""Keep carries in the forward, where the schedule says so."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from torch import fx

from reroll.program.context import Context
from reroll.program.program import Node, Program, backward, tape
from reroll.program.program import save as save_instruction
from reroll.program.registry import register_pass
from reroll.program.writing import before_turn, is_thin, operands, position, write_backward, write_save, write_tape
from reroll.schedules.interval import Interval


@register_pass("save")
def save(program: Program, context: Context) -> Program:
    """Split the tapes of the forward where the children of the root start, and save the carries there.

    No carry is saved at the start of a child that is taped by the forward.
    """
    starts = dict(context.root.placed())
    program = program.copy(parts=False)
    forward = list(before_turn(program.graph))
    saved = {position(node) for node in forward if node.target is save_instruction}
    for node in forward:
        if node.target is tape:
            _split(program.graph, node, starts, saved)
    return program


def _split(graph: fx.Graph, taped: Node, starts: dict[int, Interval], saved: set[int]) -> None:
    """Replace one tape by a tape from each of ``starts`` inside it, and its backward by theirs."""
    carry, start, stop = operands(taped)
    steps = list(starts)
    inner = steps[bisect_left(steps, start) : bisect_left(steps, stop)]
    edges = sorted({start, *inner, stop})
    kept = {step for step in inner if not starts[step].taped} - saved
    pieces: list[Node] = []
    with graph.inserting_before(taped):
        for low, high in pairwise(edges):
            if low in kept:
                write_save(graph, carry, low)
            thin = starts[low].thin if low in starts else is_thin(taped)
            carry = write_tape(graph, carry, low, high, thin)
            pieces.append(carry)
    _reverse_by(graph, next(user for user in taped.users if user.target is backward), pieces)
    taped.replace_all_uses_with(carry)
    graph.erase_node(taped)


def _reverse_by(graph: fx.Graph, reversal: Node, pieces: list[Node]) -> None:
    """Replace one backward by those of the pieces of its tape, last to first."""
    grad = operands(reversal)[1]
    with graph.inserting_before(reversal):
        for piece in reversed(pieces):
            grad = write_backward(graph, piece, grad)
    reversal.replace_all_uses_with(grad)
    graph.erase_node(reversal)
