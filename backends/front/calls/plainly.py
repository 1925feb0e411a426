"""Calls of a compiled model that torch runs as they are: Dynamo is off, or somebody around sees each operation."""

from __future__ import annotations

from reroll.backends.dynamo.entry import dynamo_is_off
from reroll.errors import warn
from reroll.graph.private import in_transform, modes_of_functions

WITHIN = (
    "a model that reroll.compile has made calls Dynamo itself, so a function compiled around it ends its graph at the "
    "call and begins another one after it; leave out fullgraph=True, or compile only what is around the model"
)
"""Why Dynamo does not read such a call."""


def runs_plainly() -> bool:
    """Whether the present call is one of them; of a transform or mode around it the user is told."""
    return dynamo_is_off() or _is_transformed()


def _is_transformed() -> bool:
    """Whether a torch.func transform, or a mode of the user's that sees operations, is around the call."""
    if in_transform():
        around = "A torch.func transform (vmap, grad, jvp, ...)"
    elif modes := modes_of_functions():
        around = f"A TorchFunctionMode ({type(modes[-1]).__name__})"
    else:
        return False
    text = (
        f"{around} is around a model that reroll.compile made, so the call runs as "
        "plain PyTorch: nothing is compiled, and no memory is saved. Use the plain model there."
    )
    warn(text)
    return True
