"""Traced graphs that update what they have made: functional, with the same values, or refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from reroll.graph.private import storage_id
from reroll.segment.joint.functional import made_functional, may_write
from reroll.segment.joint.graph import in_parts


def chained(x: Tensor) -> Tensor:
    y = 2 * x
    z = y.add_(1).pow_(2)
    return z + y


def named_again(x: Tensor) -> Tensor:
    y = (2 * x).relu_()
    z = y.sigmoid_().t()
    return y.view(-1) + z.t().reshape(-1)


def normed(x: Tensor) -> tuple[Tensor, ...]:
    mean, variance = x[0] * 0, x[0] * 0 + 1
    y = F.batch_norm(x, mean, variance, training=True)
    return F.batch_norm(y, mean, variance, training=True), mean, variance


def filled(x: Tensor) -> Tensor:
    y = torch.empty_like(x).fill_(3).copy_(x)
    return y.zero_() + x


def gradient_updates(x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad((leaf * 2).clone().mul_(leaf).sum(), leaf)
    return grad.mul_(3)


def row(x: Tensor) -> Tensor:
    y = 2 * x
    y[0].add_(1)
    return y


def other_name(x: Tensor) -> Tensor:
    y = 2 * x
    z = y.view(-1)
    y.add_(1)
    return z


def operand(x: Tensor) -> Tensor:
    return x.add_(1)


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).mul_(x)


def random(x: Tensor) -> Tensor:
    return (2 * x).bernoulli_(0.5)


def traced(function: Callable[..., object], x: Tensor) -> tuple[torch.fx.GraphModule, bool]:
    with FakeTensorMode() as mode, in_parts():
        graph = make_fx(function)(mode.from_tensor(x))
    done = made_functional(graph.graph, mode)
    graph.recompile()
    return graph, done


@pytest.mark.parametrize("function", [chained, named_again, normed, filled, gradient_updates])
def test_updates_of_own_values_are_new_values(function: Callable[..., object]) -> None:
    x = torch.randn(3, 4)
    graph, done = traced(function, x)
    assert done
    assert not any(may_write(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(x), function(x), rtol=0, atol=0)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.t.default):
        assert storage_id(node.meta["val"]) == storage_id(node.all_input_nodes[0].meta["val"])


@pytest.mark.parametrize("function", [row, other_name, operand, rounded, random])
def test_other_updates_are_left(function: Callable[..., object]) -> None:
    assert not traced(function, torch.randn(3, 4))[1]
