"""A call of a compiled model, in its thread's turn; torch runs it as it is where Dynamo is off, or somebody around sees
each operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from reroll.backends.dynamo.entry import dynamo_is_off
from reroll.backends.front.calls.compile_lock import turn
from reroll.errors import warn
from reroll.graph.private import in_transform, is_traced, modes_of_functions

WITHIN = (
    "a model that reroll.compile has made calls Dynamo itself, so a function compiled around it ends its graph at the "
    "call and begins another one after it; leave out fullgraph=True, or compile only what is around the model, and "
    "export the plain model"
)
"""Why Dynamo does not read such a call."""


class InTurn:
    """Calls a model. Whether Dynamo is off is asked within a turn, as another thread switches it off for its own."""

    model: Callable[..., Any]

    @torch.compiler.disable(reason=WITHIN)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result."""
        with turn():
            plainly = dynamo_is_off() or _is_transformed((*args, *kwargs.values()))
            rest = partial(self.model, *args, **kwargs) if plainly else self._begun(args, kwargs)
        return rest()

    def _begun(self, args: Any, kwargs: Any) -> Callable[[], Any]:
        """Run a call within this thread's turn; what is left to do behind it."""
        raise NotImplementedError


def _is_transformed(values: tuple[Any, ...]) -> bool:
    """Whether a torch.func transform, a tracer, or a mode of the user's that sees operations, is around a call with
    such values, of which the user is told."""
    if in_transform():
        around = "A torch.func transform (vmap, grad, jvp, ...)"
    elif is_traced(values):
        around = "A tracer (torch.export, make_fx, FakeTensorMode, ...)"
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
