"""A training step of a model: its leaves, and a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reroll.backends.front.observe import named_tensors
from reroll.backends.front.python_state.state import State
from reroll.errors import UnsupportedError
from reroll.graph.nested import tensors_of


def named_leaves(model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, str]]:
    """The tensors that gradients are for, and their names."""
    state = State.of(model, inputs, kwargs, parameters=False, values=False)
    for name, tensor in named_tensors(model, [tensor for tensor, _, _ in state.tensors]):
        if tensor.requires_grad and tensor.is_leaf:
            yield tensor, name


def mean_squares(result: Any) -> Tensor:
    """The mean square of each tensor in a model's result, added up."""
    values = [value for value in tensors_of(result) if value.requires_grad]
    if not values:
        raise UnsupportedError(
            "The model's result needs no gradient, so there is none to compare. Give a loss that does."
        )
    return torch.stack([value.abs().square().mean() for value in values]).sum()
