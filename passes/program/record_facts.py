"""Record what was proved of the tensors of the carry."""

from __future__ import annotations

from dataclasses import replace

from reroll.program.context import Context
from reroll.program.program import Program
from reroll.program.registry import register_pass


@register_pass("sparsity")
def sparsity(program: Program, context: Context) -> Program:
    """The program with the facts of the context, one per tensor of the carry."""
    return replace(program, facts=context.facts)
