"""A training step of any model, and all that follows from it: for comparing one way to run a model with another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def trained(run: Any, model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Outputs, gradients, buffers, and the next random number of a training step."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    outputs = tree_leaves(run(x))
    torch.stack([(number + 1) * each.sin().sum() for number, each in enumerate(outputs)]).sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [*(each.detach() for each in outputs), *gradients, *model.buffers(), torch.rand(1)]


def assert_alike(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float = 1e-12) -> None:
    """The same values, and none in the same places."""
    assert [each is None for each in found] == [each is None for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
