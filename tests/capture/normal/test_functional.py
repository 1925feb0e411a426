"""In-place code becomes values: the functional graph gives what the code gives, gradients and updates included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import reroll
from reroll.capture.normal.functional import functionalise
from reroll.errors import CaptureError
from reroll.graph.inplace import out_of_place, updated_places

Network = Callable[[Tensor, Tensor], Any]


def chained(x: Tensor, y: Tensor) -> Any:
    v = x * 2
    v += y
    v.mul_(0.5).add_(1)
    return v


def aliased(x: Tensor, y: Tensor) -> Any:
    v = x * 2
    w = v.view(-1)
    v.add_(1)
    w[::2] = 0
    return v, w, v.t()


def nested_views(x: Tensor, y: Tensor) -> Any:
    v = x * 2
    v.t()[1:].unsqueeze(0)[..., 1:].mul_(3)
    v[0][1] = 7.0
    v.select(0, 1).narrow(0, 0, 2).copy_(y[0, :2])
    return v


def masks(x: Tensor, y: Tensor) -> Any:
    v = x * 2
    v[v > 0.5] = 0
    v.masked_fill_(y > 0, -1.0)
    v[torch.tensor([0, 1]), 1] = 5
    return v.clamp_(-1, 1)


def out_argument(x: Tensor, y: Tensor) -> Any:
    v = torch.zeros_like(x).detach()
    torch.add(x.detach(), y.detach(), out=v)
    return v


def inplace_flag(x: Tensor, y: Tensor) -> Any:
    v = F.hardtanh(x * 2, inplace=True)
    return F.relu_(v * 3), v


def several_views(x: Tensor, y: Tensor) -> Any:
    """What gives several views at once is read after their memory was updated, or updates it."""
    with torch.no_grad():
        v = x * 2
        rows, (left, right), (first, *_) = v.unbind(0), v.split(2, 1), torch.chunk(v.t(), 2)
        v[0].mul_(0.5)
        seen = rows[0] + 1, left.sum(), first.clone()
        right.add_(1)
        rows[1].zero_()
        return *seen, rows[1], right * 2, v


def several_views_of_an_input(x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        rows = y.unbind(0)
        y.add_(x)
        rows[0].mul_(2)
        return rows[0] + rows[1]


def input_updated(x: Tensor, y: Tensor) -> Any:
    y.mul_(2)
    z = y + x
    y[0] = 1
    return z


def data_only(x: Tensor, y: Tensor) -> Any:
    v = x * 2
    with torch.no_grad():
        v[v > 0.5] = 0
    v.data.mul_(2)
    w = v.detach()
    w += 1
    return v * 3


def statistics(x: Tensor, y: Tensor) -> Any:
    mean, var = y[0].clone(), y[1].abs().clone()
    return F.batch_norm(x, mean, var, training=True, momentum=0.3), mean, var


def two_results(x: Tensor, y: Tensor) -> Any:
    v = x * 1
    a, b = v[:1], v[1:]
    a += b
    return v, a, b


def left_behind(x: Tensor, y: Tensor) -> Any:
    """What is detached and updated with a gradient, twice, by rows and as a whole; what it was taken of is gone."""
    v = x * 2
    w = v.t().detach()
    w += x.t().square()
    w[1:].mul_(x[0, 1].abs())
    h = (w * 3).detach()
    h += y.t() * x.t()
    return w, h


def handed_on(x: Tensor, y: Tensor) -> Any:
    """One memory is detached and updated again and again."""
    h = x * y
    for _ in range(3):
        h = h.detach()
        h += x.square()
    return h


NETWORKS = (
    chained,
    aliased,
    nested_views,
    masks,
    out_argument,
    inplace_flag,
    several_views,
    several_views_of_an_input,
    input_updated,
    data_only,
    statistics,
    two_results,
    left_behind,
    handed_on,
)


def captured(network: Network, *inputs: Tensor) -> fx.GraphModule:
    """Dynamo's graph of a network."""
    made: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, _: Any) -> Any:
        made.append(copy.deepcopy(module))
        return module.forward

    torch.compile(network, backend=keep, fullgraph=True)(*inputs)
    return made[0]


def outcome(run: Callable[..., Any], x: Tensor, y: Tensor) -> list[Tensor]:
    """Outputs, the gradient of x, and what became of y."""
    x, y = x.clone().requires_grad_(), y.clone()
    made = run(x, y)
    outputs = list(made) if isinstance(made, tuple | list) else [made]
    loss = sum((i + 1) * value.pow(2).sum() for i, value in enumerate(outputs))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, x) if loss.requires_grad else ()
    return [*(value.detach() for value in outputs), *grads, y]


def values() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_functional_graph_gives_the_same(network: Network) -> None:
    x, y = values()
    module = captured(network, x.clone().requires_grad_(), y.clone())
    assert any(updated_places(node) for node in module.graph.nodes)
    new = fx.GraphModule(module, functionalise(module.graph))
    new.graph.lint()
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    order = [0 if "x" in name else 1 for name in names]
    expected = outcome(network, x, y)
    found = outcome(lambda *pair: new(*(pair[i] for i in order)), x, y)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


@pytest.mark.parametrize("network", NETWORKS)
def test_nothing_is_updated_but_inputs_at_the_end(network: Network) -> None:
    x, y = values()
    nodes = list(functionalise(captured(network, x.clone().requires_grad_(), y.clone()).graph).nodes)
    for at, node in enumerate(nodes):
        if updated_places(node) and node.target is not out_of_place:
            assert node.target == "copy_"
            assert node.args[0].op == "placeholder"
            assert all(later.op == "output" or later.target == "copy_" for later in nodes[at + 1 :])


def read_again(v: Tensor, w: Tensor, x: Tensor) -> Any:
    w += x
    return w + v


def view_read_again(v: Tensor, w: Tensor, x: Tensor) -> Any:
    first = v[0]
    w += x
    return w + first


def read_by_a_later_update(v: Tensor, w: Tensor, x: Tensor) -> Any:
    w += x
    w += v
    return w


def updated_itself(v: Tensor, w: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        v.mul_(2)
    w += x
    return w


@pytest.mark.parametrize("network", [read_again, view_read_again, read_by_a_later_update, updated_itself])
def test_what_detach_gave_and_the_rest_still_reads_is_refused(network: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    module = captured(lambda x, y: network(v := x * 2, v.detach(), x), *map(Tensor.requires_grad_, values()))
    with pytest.raises(CaptureError, match=r"what detach\(\) gave is updated"):
        functionalise(module.graph)


def test_what_detach_gave_of_an_input_is_the_input() -> None:
    def network(x: Tensor, y: Tensor) -> Tensor:
        w = y.detach()
        w += x
        return w

    x, y = values()
    module = captured(network, x.requires_grad_(), y)
    with pytest.raises(CaptureError, match=r"what detach\(\) gave is updated"):
        functionalise(module.graph)


def test_memory_that_is_shared_in_a_hidden_way_is_refused() -> None:
    def network(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y + 1

    x = torch.randn(2, 4)
    module = captured(network, x, torch.randn(2, 4))
    first, second = module.graph.find_nodes(op="placeholder")
    second.meta["example_value"] = first.meta["example_value"].view(4, 2)
    with pytest.raises(CaptureError, match="shares memory with one that is updated in place"):
        functionalise(module.graph)


DROPS: dict[str, Callable[[Tensor], Tensor]] = {
    "in evaluation": lambda h: F.dropout(h, 0.5, training=False),
    "of none": lambda h: F.dropout(h, 0.0, training=True),
    "twice": lambda h: F.dropout(F.dropout(h, 0.5, False), p=0.0),
    "of whole rows": lambda h: F.alpha_dropout(h, 0.3, training=False),
    "a view of it": lambda h: F.dropout(h, 0.5, False)[:, 1:],
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("which", ["what it gives", "its operand"])
@pytest.mark.parametrize("name", DROPS)
def test_a_dropout_that_drops_nothing_gives_its_operand_itself(name: str, which: str) -> None:
    """torch's own trace loses that: what updates one updates both."""

    def model(x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1:])
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + 0.5 * h) * 2
            d = DROPS[name](h)
            (d if which == "what it gives" else h).add_(1)
            h = h * 0.5 + d.sum()
        return h

    x = torch.randn(12, 3, 4, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    for run in (
        reroll.compile(model, lowering="eager"),
        torch.compile(model, backend="reroll", options={"lowering": "eager"}),
    ):
        torch.testing.assert_close(torch.autograd.grad(run(x).sum(), x)[0], expected)


class Counts(torch.nn.Module):
    """Counts in an array of numpy's how often it was called, behind a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + 0.5 * h)
        self.calls[1] += 1
        self.calls[1:] *= 2
        return h


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
@pytest.mark.parametrize("door", ["reroll.compile", "torch.compile"])
def test_an_array_that_a_model_writes_is_written(door: str) -> None:
    model, plain, x = Counts(), Counts(), torch.randn(20, 2)
    options: Any = {"lowering": "eager"}
    by_backend = door == "torch.compile"
    run = torch.compile(model, backend="reroll", options=options) if by_backend else reroll.compile(model, **options)
    for _ in range(3):
        torch.testing.assert_close(run(x), plain(x))
    assert (model.calls == plain.calls).all()


ROWS: dict[str, Callable[[Tensor], Any]] = {
    "iterated": lambda x: x,
    "unbind": lambda x: x.unbind(0),
    "split": lambda x: [each[0] for each in x.split(1)],
    "chunk": lambda x: [each[0] for each in x.chunk(x.shape[0])],
    "list": list,
}


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("form", ROWS)
def test_rows_that_are_taken_before_their_memory_is_updated(form: str, door: str) -> None:
    """They were read as they had been, in silence."""

    def network(x: Tensor) -> Tensor:
        h, x = x[0] * 0, x * 1.0
        for t, row in enumerate(ROWS[form](x)):
            x[t].mul_(0.5)
            h = 0.8 * h + torch.sin(row)
        return h

    x = torch.randn(12, 3, 4, dtype=torch.float64)
    options: dict[str, Any] = {"lowering": "eager", "proof": "never"}
    if door == "backend":
        compiled = torch.compile(network, backend="reroll", options=options)
    else:
        compiled = reroll.compile(network, **options)
    torch.testing.assert_close(compiled(x), network(x))


def clamped(net: nn.Linear) -> None:
    net.weight.data.clamp_(-0.2, 0.2).mul_(0.9)


def decayed(net: nn.Linear) -> None:
    with torch.no_grad():
        net.weight[1].mul_(0.5)


def averaged(net: nn.Linear) -> None:
    with torch.no_grad():
        net.bias.view(2, 2).lerp_(net.weight[:2, :2], 0.1)


@pytest.mark.parametrize("update", [clamped, decayed, averaged])
def test_a_parameter_is_updated_at_sizes_that_dynamo_does_not_know(update: Callable[[nn.Linear], None]) -> None:
    """From the second length on, at which sizes are symbols, the update was left out, in silence."""
    torch.manual_seed(0)
    plain, net = (nn.Linear(4, 4).double().requires_grad_(False) for _ in range(2))
    net.load_state_dict(plain.state_dict())

    def network(net: nn.Linear, x: Tensor) -> Tensor:
        update(net)
        h = x[0] * 0
        for t in range(x.shape[0]):
            h = torch.tanh(net(h) + x[t])
        return h

    torch._dynamo.reset()
    options: dict[str, Any] = {"lowering": "eager", "proof": "never"}
    compiled = torch.compile(network, backend="reroll", options=options)
    for steps in (13, 7, 9):
        x = torch.randn(steps, 3, 4, dtype=torch.float64)
        torch.testing.assert_close(compiled(net, x), network(plain, x))
        torch.testing.assert_close(net.state_dict(), plain.state_dict())
