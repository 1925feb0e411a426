"""Name the codec under which each tensor of a kept carry is held."""

from __future__ import annotations

from reroll.context import Context
from reroll.program import Program, offload, save
from reroll.registry import register_pass


@register_pass("compress")
def compress(program: Program, context: Context) -> Program:
    """Set the ``codec`` of every save and offload from the facts of the program; nothing with ``codec="none"``."""
    if context.codec == "none" or not program.facts:
        return program
    codec = tuple(fact.codec for fact in program.facts)
    program = program.copy()
    for node in (node for graph in program.graphs for node in graph.nodes):
        if node.target in (save, offload):
            node.kwargs = {"codec": codec}
    return program
