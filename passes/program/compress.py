"""Name the codec under which each tensor of a kept carry is held."""

from __future__ import annotations

from reroll.program.context import Context
from reroll.program.program import Node, Program, offload, save, turn
from reroll.program.registry import register_pass
from reroll.program.writing import RUNS, before_turn, operands
from reroll.segment.facts import LOSSY, kept_as


@register_pass("compress")
def compress(program: Program, context: Context) -> Program:
    """Set the ``codec`` of every save and offload from the facts of the program; nothing with ``codec="none"``.

    What the forward itself runs from, or gives as its result, is never rounded. The first carry is there anyway, so a
    save of it stays as it is.
    """
    if context.codec == "none" or not program.facts:
        return program
    lossless, asked = (tuple(kept_as(fact, codec) for fact in program.facts) for codec in ("auto", context.codec))
    program = program.copy()
    exact = _read_by_forward(program) if context.codec in LOSSY else set()
    for node in (node for graph in program.graphs for node in graph.nodes):
        if node.target in (save, offload) and not _is_first(node):
            node.kwargs = {"codec": lossless if node in exact else asked}
    return program


def _is_first(node: Node) -> bool:
    """Whether a node saves the carry that its graph is given."""
    return node.target is save and operands(node)[0].op == "placeholder"


def _read_by_forward(program: Program) -> set[Node]:
    """What lies between the runs of the forward, or its end, and the runs whose carries they read."""
    found: set[Node] = set()
    readers = [node for node in program.graph.nodes if node.target is turn]
    readers += [node for node in before_turn(program.graph) if node.target in RUNS]
    todo = [operands(node)[0] for node in readers]
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node.target not in RUNS and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
