"""What is made under ``no_grad`` and read with gradients: no gradient flows there, wherever it is made in the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.capture.normal.modes import cut_gradients
from reroll.capture.recorder.graph import GraphRecorder

pytestmark = pytest.mark.usefixtures("double_precision")
T, B, N, H = 18, 2, 3, 4


class Net(nn.Module):
    """A recurrent cell, and what a body does with it."""

    def __init__(self, body: Callable[[Net, Tensor, Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.cell, self.lin, self.body = nn.RNNCell(N, H), nn.Linear(H, H), body

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the body gives."""
        return self.body(self, x, x.new_zeros(x.shape[1], H))


def row(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for t in range(len(x)):
        with torch.no_grad():
            read = x[t]
        h = net.cell(read, h)
    return h


def rows(net: Net, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        read = x.unbind(0)
    for each in read:
        h = net.cell(each, h)
    return h


def part(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for t in range(len(x)):
        with torch.no_grad():
            read = x[t]
        h = net.cell(x[t], h) + read[:, :1]
    return h


def weight(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for t in range(len(x)):
        with torch.no_grad():
            scale = net.lin.weight[0]
        h = net.cell(x[t], h) * scale
    return h


def written(net: Net, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    out = x.new_zeros(len(x), *h.shape)
    for t in range(len(x)):
        h = net.cell(x[t], h)
        with torch.no_grad():
            out[t] = h
        if t:
            h = h + out[t - 1]
    return out.sum(0), h


def stacked(net: Net, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    found = []
    for t in range(len(x)):
        h = net.cell(x[t], h)
        found.append(h)
    with torch.no_grad():
        y = torch.stack(found)
    return y * net.lin.weight[0], h


def behind(net: Net, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    y = stacked(net, x, h)[0]
    with torch.no_grad():
        read, last = y[3], y[1:]
    return read * net.lin.weight[1], last * net.lin.weight[2], y


def updated(net: Net, x: Tensor, h: Tensor) -> Tensor:
    """What is updated without gradients keeps its history."""
    for t in range(len(x)):
        h = net.cell(x[t], h) + 1
        with torch.no_grad():
            h.mul_(0.5)
    return h


BODIES = [row, rows, part, weight, written, stacked, behind, updated]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("late", [False, True])
def test_gradients_are_those_of_eager(body: Callable[[Net, Tensor, Tensor], Tensor], late: bool) -> None:
    def half(net: Net, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return body(net, x, h), torch.stack([net.cell(each, h) for each in x])[len(x) // 2 :]

    net, x = Net(half if late else body), torch.randn(T, B, N, requires_grad=True)
    compiled = reroll.compile(net, lowering="eager", proof="never")
    leaves, found = [x, *net.parameters()], []
    for model in (net, compiled):
        results = torch.utils._pytree.tree_leaves(model(x))
        loss = sum((each * (at + 1)).sin().sum() for at, each in enumerate(results))
        found.append([*results, *torch.autograd.grad(loss, leaves, allow_unused=True)])
    for eager, rolled in zip(*found, strict=True):
        assert (eager is None) == (rolled is None)
        torch.testing.assert_close(rolled, eager, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("body", [row, rows, part, weight, written, stacked])
def test_loops_are_found(body: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
    compiled = reroll.compile(Net(body), lowering="eager", proof="never")
    assert max(loop.recurrence.steps for loop in reroll.explain(compiled, torch.randn(T, B, N)).loops) >= T - 2


def test_nothing_is_cut_that_needs_no_gradient() -> None:
    x = torch.randn(T, B, N)
    recorder = GraphRecorder([x], {})
    with recorder.recording():
        with torch.no_grad():
            read = x[0] * 2
        made = read + 1
    graph = recorder.finish([made])[0].graph
    before = len(graph.nodes)
    cut_gradients(graph)
    assert len(graph.nodes) == before


@pytest.mark.parametrize("door", ["backend", "compile"])
def test_a_part_that_is_updated_without_gradients(door: str) -> None:
    """Torch does not say of a view that was made so whether it has a history."""

    def body(net: Net, x: Tensor, h: Tensor) -> Tensor:
        for t in range(len(x)):
            read = x[t] * 1.0
            with torch.no_grad():
                read[:, :2].mul_(0.5)
            h = net.cell(read, h)
        return h

    net = Net(body)
    backend = torch.compile(net, backend="reroll", options={"lowering": "eager", "proof": "never"})
    run = backend if door == "backend" else reroll.compile(net, lowering="eager", proof="never")
    for steps in (T, 9):  # at the second length sizes are symbols
        x = torch.randn(steps, B, N, requires_grad=True)
        found = [(y := model(x), *torch.autograd.grad(y.sum(), [x, *net.cell.parameters()])) for model in (net, run)]
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)
