"""A run that is looked at keeps no graph that grows with it, and changes nothing that anybody can see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from length_networks import Flat
from reroll.capture.recorder.graph import GraphRecorder

STEPS = 1000


def nodes_behind(value: Tensor) -> int:
    """How many nodes of autograd's graph a tensor keeps alive."""
    seen, todo = set(), [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [each for each, _ in node.next_functions]
    return len(seen)


def looked_at(model: Callable[..., Any], *args: Tensor) -> Any:
    """What a model returns while it is recorded."""
    recorder = GraphRecorder(args, {}, folds=True)
    with recorder.recording():
        result = model(*args)
    targets = {getattr(node.target, "__name__", node.target) for node in recorder.graph.nodes}
    assert not {"detach_", "as_strided", "_set_grad_enabled"} & targets
    return result


def plain(w_HH: Tensor, h_BH: Tensor) -> Tensor:
    return torch.tanh(h_BH @ w_HH) + 0.1


def chunks(w_HH: Tensor, h_BH: Tensor) -> Tensor:
    first, second = plain(w_HH, h_BH).chunk(2, 1)
    return torch.cat([second, first.mul(0.5)], 1)


def in_place(w_HH: Tensor, h_BH: Tensor) -> Tensor:
    h_BH = plain(w_HH, h_BH)
    h_BH[0].mul_(0.5)
    h_BH.add_(0.1)
    return h_BH


def function(w_HH: Tensor, h_BH: Tensor) -> Tensor:
    applied: Tensor = Flat.apply(h_BH @ w_HH)  # type: ignore[no-untyped-call]
    return applied


STEP = {"plain": plain, "chunks": chunks, "in place": in_place, "function": function}


@pytest.mark.parametrize("name", STEP)
def test_a_long_run_has_a_short_history(name: str) -> None:
    def model(w_HH: Tensor, h_BH: Tensor) -> Tensor:
        for _ in range(STEPS):
            h_BH = STEP[name](w_HH, h_BH)
        return h_BH

    w_HH, h_BH = 0.4 * torch.randn(4, 4).requires_grad_(), torch.randn(2, 4)
    w_HH.retain_grad()
    expected = model(w_HH, h_BH)
    found = looked_at(model, w_HH, h_BH)
    assert torch.equal(found, expected)
    assert found.requires_grad
    assert not found.is_leaf
    assert nodes_behind(expected) > STEPS
    assert nodes_behind(found) < STEPS


def test_views_that_wait_may_be_changed_in_place() -> None:
    def model(w_HH: Tensor, h_BH: Tensor) -> Tensor:
        made = plain(w_HH, h_BH)
        row, (first, second) = made[0], plain(w_HH, h_BH).chunk(2, 1)
        for _ in range(STEPS):
            h_BH = plain(w_HH, h_BH)
        row.add_(1.0)
        return h_BH + made + torch.cat([first + 1, second], 1)

    w_HH, h_BH = (0.4 * torch.randn(4, 4)).requires_grad_(), torch.randn(2, 4)
    assert torch.equal(looked_at(model, w_HH, h_BH), model(w_HH, h_BH))


@pytest.mark.parametrize("same", [Tensor.contiguous, lambda v: v.to(torch.float32)])
def test_a_tensor_from_before_the_run_keeps_its_history(same: Callable[[Tensor], Tensor]) -> None:
    def model(w_HH: Tensor, h_BH: Tensor) -> Tensor:
        again_BH = same(h_BH)
        for _ in range(STEPS):
            h_BH = plain(w_HH, again_BH)
        return h_BH

    w_HH = (0.4 * torch.randn(4, 4)).requires_grad_()
    start_BH = torch.randn(2, 4) @ w_HH
    behind = nodes_behind(start_BH)
    looked_at(model, w_HH, start_BH)
    assert nodes_behind(start_BH) >= behind
    start_BH.sum().backward()
    assert w_HH.grad is not None
    assert w_HH.grad.abs().sum() > 0
