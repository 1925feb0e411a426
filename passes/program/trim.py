"""Remove what nobody needs."""

from __future__ import annotations

import operator

from torch import fx

from reroll.program.context import Context
from reroll.program.program import Node, Program, offload, recompute, reload, reverse, save
from reroll.program.registry import register_pass
from reroll.program.writing import RUNS, operands

REMOVABLE = (recompute, save, offload, reload, operator.getitem)


@register_pass("trim")
def trim(program: Program, _context: Context) -> Program:
    """Remove instructions without a user, and saves whose readers can read the register instead."""
    program = program.copy()
    for graph in program.graphs:
        for node in reversed(list(graph.nodes)):
            if node.target in REMOVABLE and not node.users:
                graph.erase_node(node)
        for node in list(graph.nodes):
            if node.target is save and _readers_see_register(node):
                _read_register(graph, node)
    return program


def _readers_see_register(kept: Node) -> bool:
    """Whether all readers of a save come before its source is lost, or lose it themselves."""
    source, waiting = operands(kept)[0], set(kept.users)
    if any(reader.target is reverse for reader in waiting):
        return False  # a part reads its carry more than once
    node = kept.next
    while waiting and node.op != "output":
        waiting.discard(node)
        if node.target in (*RUNS, reverse):
            break
        node = node.next
    in_register = source.op == "placeholder" or source.target in RUNS
    return in_register and not waiting


def _read_register(graph: fx.Graph, kept: Node) -> None:
    kept.replace_all_uses_with(operands(kept)[0])
    graph.erase_node(kept)
