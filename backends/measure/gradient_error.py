"""``reroll.gradient_error``: how far a codec that rounds moves the gradients, measured on the user's own model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reroll.backends.codecs.rounding import exactly
from reroll.backends.construct.stages.takeover import aside
from reroll.backends.front.python_state.state import State
from reroll.backends.measure.explain import model_of, reached
from reroll.backends.measure.plain import mean_squares, named_leaves
from reroll.backends.runtime.randomness import random_numbers_kept
from reroll.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class GradientError:
    """Relative errors of gradients: the norm of the difference over the norm of the exact gradient.

    ``total`` is that of all gradients as one vector, ``tensors`` that of each, by the name of its parameter or input.
    """

    total: float
    tensors: Mapping[str, float]

    def __str__(self) -> str:
        lines = [f"{error:.2e}  {name}" for name, error in sorted(self.tensors.items(), key=lambda item: -item[1])]
        return "\n".join([f"{self.total:.2e}  all gradients", *lines])


@aside()
def gradient_error(
    compiled_model: Any, *inputs: Any, loss: Callable[[Any], Tensor] | None = None, **kwargs: Any
) -> GradientError:
    """Run forward and backward twice, with the kept carries as they are and rounded, and compare the gradients.

    loss: from the model's result to a number; without one the mean square of each tensor in the result. The error
    stands in ``reroll.explain`` of the same call from then on. Parameters, gradients, buffers, attributes of modules
    and random numbers are afterwards as they were. Without a codec that rounds the error is 0. Raises UnsupportedError
    if nothing needs a gradient.
    """
    graph = reached(compiled_model, inputs, kwargs)
    model = model_of(compiled_model)
    names = dict(named_leaves(model, inputs, kwargs))

    def gradients() -> list[Tensor | None]:
        state = State.of(model, parameters=False)
        try:
            with random_numbers_kept():
                value = (loss or mean_squares)(compiled_model(*inputs, **kwargs))
                return list(torch.autograd.grad(value, list(names), allow_unused=True))
        finally:
            state.restore()

    if not names:
        raise UnsupportedError("gradient_error found no parameter and no input that needs a gradient.")
    with exactly():
        exact = gradients()
    found = _compared(list(names.values()), exact, gradients())
    for built in graph.built:
        built.executable.ledger.gradient_error = found.total
    return found


def _compared(names: list[str], exact: list[Tensor | None], rounded: list[Tensor | None]) -> GradientError:
    squares = dict[str, tuple[float, float]]()
    for name, before, after in zip(names, exact, rounded, strict=True):
        if before is not None and after is not None:
            squares[name] = float((after - before).norm()) ** 2, float(before.norm()) ** 2
    total = [sum(pair[at] for pair in squares.values()) for at in (0, 1)]
    return GradientError(_ratio(*total), {name: _ratio(*pair) for name, pair in squares.items()})


def _ratio(difference: float, norm: float) -> float:
    """The relative error, of squared norms; of a gradient of zeros 0 or infinite."""
    if difference == 0:
        return 0.0
    return float((difference / norm) ** 0.5) if norm else float("inf")
