"""Which differences eager shows itself when its parameters and inputs change in their last digits.

A result that is rounding and nothing else (batch norm of rows that are all equal) has no digits to compare. It is
found by running eager again on numbers that are moved by far more than rounding, and far less than the tolerance times
the condition of a program that can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from reroll.backends.measure.check import Check, Difference

DRAWS = 4  # a comparison beside its threshold falls to either side
LARGER = 10.0  # by so much a compiled difference may be larger than the largest that eager shows


def with_digits(
    found: Sequence[Difference],
    check: Callable[..., Check],
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    nudge: float,
) -> list[Difference]:
    """The differences of ``check`` but those that eager shows as large, where its numbers move by ``nudge``.

    What is no number remains. So does all of a model that eager cannot run on other numbers (an input whose entries
    share memory).
    """
    shown: dict[str, float] = {}
    for draw in range(DRAWS):
        try:
            moved = check(_Moved(model, nudge, draw), *args, **kwargs)
        except RuntimeError:
            return list(found)
        for each in moved.differences:
            shown[each.name] = max(shown.get(each.name, 0.0), each.error or 0.0)
    return [each for each in found if each.error is None or each.error > LARGER * shown.get(each.name, 0.0)]


class _Moved:
    """A model that moves its parameters and the tensors it is given before it runs; ``reroll.check`` puts them back."""

    def __init__(self, model: Any, nudge: float, seed: int) -> None:
        self.reroll_caller = self
        self.model, self.nudge, self.seed = model, nudge, seed

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        draw = torch.Generator().manual_seed(self.seed)
        parameters = self.model.parameters() if isinstance(self.model, torch.nn.Module) else ()
        values = dict.fromkeys(each for each in (*parameters, *tree_leaves((inputs, kwargs))) if _moves(each))
        with torch.no_grad():
            for value in values:
                value.mul_(1 + self.nudge * (2 * torch.rand(value.shape, dtype=value.dtype, generator=draw) - 1))
        return self.model(*inputs, **kwargs)


def _moves(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
