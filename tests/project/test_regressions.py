"""Defects that a review found, each beside plain autograd or as the fact that was wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pairs import SCHEDULES, B, H, I, data, grad_of, pair, same, same_grads
from reroll.backends.inductor.lower import _halves
from reroll.segment.trace import Traced


class Penalty(torch.autograd.Function):
    """Gives its first argument, and adds the second to the loss: a gradient of one, whatever gradient arrives."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones((), dtype=grad.dtype)


penalty: Any = Penalty.apply


class Penalised(nn.Module):
    """A penalty at every step on a parameter that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wr, self.scale = nn.Linear(I, H), nn.Linear(H, H), nn.Parameter(torch.tensor(0.7))

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, ys = x_TBI.new_zeros(B, H), []
        for t in range(x_TBI.shape[0]):
            h_BH = torch.tanh(self.wi(x_TBI[t]) + self.wr(h_BH))
            ys.append(penalty(h_BH, self.scale * 3.0))
        return torch.stack(ys)


@pytest.mark.parametrize("options", SCHEDULES[1:3], ids=("standard", "double"))
def test_a_gradient_that_depends_on_no_other_is_not_dropped(options: dict[str, Any]) -> None:
    plain, twin, fast = pair(options, Penalised)
    x = data()
    plain(x).square().sum().backward()
    fast(x).square().sum().backward()
    same(twin.scale.grad, plain.scale.grad)
    same_grads(twin, plain)


@pytest.mark.parametrize("replay", [False, True], ids=("kept", "replayed"))
@pytest.mark.parametrize(
    "decide",
    [
        lambda v: v.to(torch.int32).to(v.dtype),
        lambda v: torch.trunc(v),
        lambda v: torch.remainder(v, 0.3),
        lambda v: torch.div(v, 0.3, rounding_mode="floor"),
        lambda v: v.bool().to(v.dtype),
    ],
    ids=("cast", "trunc", "remainder", "division", "bool"),
)
def test_roundings_are_not_decided_again_in_the_backward(decide: Any, replay: bool) -> None:
    def joint(v: Tensor, w: Tensor, tangent: Tensor) -> Any:
        made = torch.tanh(v * w) * decide(v * 3.0)
        return made, tangent * decide(v * 3.0) * w

    values = torch.randn(3, 4, 4).unbind()
    graph = make_fx(joint, tracing_mode="fake")(*values)
    list(graph.graph.find_nodes(op="placeholder"))[-1].target = "tangents_1"
    traced = Traced(1, graph, FakeTensorMode(), 1, (0,), (), 2, (), (), 0, ())
    _, backward, _ = _halves(traced, pack=False, replay=replay)
    assert backward is not None
    again = {str(node.target).split(".")[1] for node in _made(backward)}
    assert again <= {"mul", "_to_copy"}
    assert not any(node.meta["val"].dtype in (torch.int32, torch.bool) for node in _made(backward))


def _made(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def test_updates_of_an_input_under_symbolic_sizes_keep_its_gradient() -> None:
    """Dynamo makes the batch symbolic at its second size; the input is no leaf, so its update goes on in its graph."""

    def network(x: Tensor, h: Tensor) -> Tensor:
        for t in range(x.shape[0]):
            h.mul_(0.5)
            h.add_(torch.tanh(x[t] + h))
        return h * 1

    fast = torch.compile(network, backend="reroll", fullgraph=True, options={"lowering": "eager"})
    for batch in (2, 3, 5):
        x, start = torch.randn(6, batch, 4).double(), torch.randn(batch, 4).double()
        grads = []
        for run in (network, fast):
            h = start.clone().requires_grad_()
            (run(x, passed := h * 1).square().sum() + passed.sin().sum()).backward()
            grads.append(grad_of(h))
        same(grads[1], grads[0])
