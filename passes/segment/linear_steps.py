"""Carries that enter a step linearly as matrices: k steps of them as products, not one after another.

Linear attention, retention and fast weights add an outer product to a matrix in each step, and read a row of it. Of the
steps of a segment all that is read is a product of matrices (``reroll.segment.linear``), exact to rounding, and the
states between are neither made nor kept for the backward. A step that has no such carry stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from reroll.program.context import Context
from reroll.program.registry import register_pass
from reroll.segment.linear.steps import LINEAR
from reroll.segment.trace import linear_carries


@register_pass("linear-steps", on="step")
def linear_steps(step: fx.GraphModule, context: Context) -> fx.GraphModule:
    """The step; one that has linear carries is marked, so that its segments do them together."""
    if context.recurrence is None or not linear_carries(replace(context.recurrence, step=step)):
        return step
    marked = fx.GraphModule(step, step.graph)
    marked.meta = {**step.meta, LINEAR: True}
    return marked
