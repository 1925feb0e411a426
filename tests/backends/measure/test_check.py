"""``reroll.check`` sees whatever a compiled call does otherwise than the plain one, and changes nothing."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from networks import Half
from reroll.backends.measure.check import distance
from reroll.errors import DifferenceError


class Net(nn.Module):
    """Norms with statistics, dropout, a counter and a parameter that only one result reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.calls, self.p = 0, 0.1

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = x.new_zeros(3, 4)
        for t in range(x.shape[0]):
            h = nn.functional.dropout(torch.tanh(self.norm(self.cell(x[t]) + h)), self.p, self.training)
        self.calls += 1
        return {"h": h, "turned": h.t(), "scaled": [h * self.scale], "expanded": h.expand(2, 3, 4)}


def made() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(12, 3, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("door", ["compile", "backend", pytest.param("plain", marks=pytest.mark.inductor)])
def test_a_compiled_model_is_equal_and_nothing_changes(door: str) -> None:
    net, x = made()
    net.p = 0.0 if door == "plain" else 0.1  # inductor draws other random numbers than torch
    net.cell.weight.grad = torch.full_like(net.cell.weight, 3.0)
    before, values, state = copy.deepcopy(net.state_dict()), x.detach().clone(), torch.get_rng_state()
    model: Any = net
    if door == "compile":
        model = reroll.compile(net, lowering="eager")
    elif door == "backend":
        model = torch.compile(net, backend="reroll", options={"lowering": "eager"})
    found = reroll.check(model, x, strict=True, measure=door != "plain")
    assert found.equal
    assert found.error < 1e-10
    assert str(found).startswith("equal to")
    if found.plain and found.compiled:
        assert min(found.plain.local_peak, found.compiled.local_peak) > 0
        assert "local peak" in str(found)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(x, values)
    assert x.grad is None
    assert net.cell.bias.grad is None
    assert torch.equal(net.cell.weight.grad, torch.full_like(net.cell.weight, 3.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert net.calls == 0


def value(result: Any, net: Net) -> None:
    result["scaled"][0] = result["scaled"][0] * (1 + 1e-6)


def structure(result: Any, net: Net) -> None:
    result["scaled"] = tuple(result["scaled"])


def layout(result: Any, net: Net) -> None:
    result["turned"] = result["turned"].contiguous()


def dtype(result: Any, net: Net) -> None:
    result["h"] = result["h"].float()


def gradient(result: Any, net: Net) -> None:
    result["h"] = result["h"] + 0.001 * (net.cell.bias - net.cell.bias.detach())


def no_gradient(result: Any, net: Net) -> None:
    result["scaled"] = [result["scaled"][0].detach() + 0 * result["h"]]


def detached(result: Any, net: Net) -> None:
    result["turned"] = result["turned"].detach()


def buffer(result: Any, net: Net) -> None:
    assert net.norm.num_batches_tracked is not None
    net.norm.num_batches_tracked.add_(1)


def attribute(result: Any, net: Net) -> None:
    net.calls += 1


def random(result: Any, net: Net) -> None:
    torch.rand(1)


def not_a_number(result: Any, net: Net) -> None:
    result["h"] = torch.where(torch.arange(4) == 0, float("nan"), result["h"])


def order(result: Any, net: Net) -> None:
    result["expanded"] = result["expanded"].transpose(1, 2).contiguous().transpose(1, 2)


CHANGES = {
    value: "result['scaled'][0]: 1.0e-06 off",
    structure: "structure of the result",
    layout: "layout of result['turned']",
    order: "layout of result['expanded']: strides (12, 1, 3) instead of (0, 4, 1)",
    dtype: "float32 (3, 4) instead of float64 (3, 4)",
    gradient: "gradient of cell.bias",
    no_gradient: "gradient of scale: None instead of float64 (4,)",
    detached: "requires_grad of result['turned']: False instead of True",
    buffer: "afterwards",
    attribute: "calls: 2 instead of 1",
    random: "random numbers that follow",
    not_a_number: "inf off",
}


@pytest.mark.parametrize(
    ("other", "equal"),
    [(lambda row: row.contiguous(), True), (lambda row: row.t().contiguous().t(), False)],
)
def test_what_eager_takes_out_of_something_larger_may_be_dense(other: Any, equal: bool) -> None:
    def row(x_BTH: Tensor) -> Tensor:
        return x_BTH[:, 1]

    def copied(x_BTH: Tensor) -> Any:
        return other(row(x_BTH))

    copied.reroll_caller = SimpleNamespace(model=row)  # type: ignore[attr-defined]
    assert reroll.check(copied, torch.randn(3, 5, 4, requires_grad=True), measure=False).equal == equal


def test_what_eager_expands_may_be_written_out() -> None:
    net, x = made()

    def written_out(x: Tensor) -> Any:
        result = net(x)
        return {**result, "expanded": result["expanded"].contiguous()}

    written_out.reroll_caller = SimpleNamespace(model=net)  # type: ignore[attr-defined]
    assert reroll.check(written_out, x, measure=False).equal


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_kind_of_difference_is_found(change: Any) -> None:
    net, x = made()

    def compiled(x: Tensor) -> Any:
        result = net(x)
        change(result, net)
        return result

    compiled.reroll_caller = SimpleNamespace(model=net)  # type: ignore[attr-defined]
    found = reroll.check(compiled, x, measure=False)
    assert not found.equal
    assert any(CHANGES[change] in str(each) for each in found.differences), str(found)
    assert "DIFFERENT" in str(found)
    with pytest.raises(DifferenceError, match="differs from the plain one in"):
        reroll.check(compiled, x, measure=False, strict=True)


def test_distances() -> None:
    a = torch.tensor([1.0, -2.0, float("nan"), float("inf")])
    assert distance(a, a.clone()) == 0
    assert distance(a[:2], a[:2] + torch.tensor([0.0, 0.5])) == 0.25
    assert distance(a, a.nan_to_num(0)) == float("inf")
    assert distance(torch.zeros(2), torch.full((2,), 1e-30)) == float("inf")
    assert distance(torch.zeros(2), torch.full((2,), 1e-3), least=1.0) == pytest.approx(1e-3)
    assert distance(torch.empty(0), torch.empty(0)) == 0
    assert distance(torch.tensor([True, False]), torch.tensor([True, True])) == 1


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_sparse_gradients_and_buffers_are_compared(kind: str) -> None:
    class Linked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.links = nn.Parameter(getattr(torch.eye(4), f"to_sparse_{kind}")())

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.sparse.mm(self.links, x)
            return found

    net, x = Linked(), torch.randn(4, 3)

    def compiled(x: Tensor) -> Tensor:
        changed: Tensor = net(x) * 1.01
        return changed

    compiled.reroll_caller = SimpleNamespace(model=net)  # type: ignore[attr-defined]
    assert reroll.check(torch.compile(net, backend="reroll"), x, measure=False).equal
    found = reroll.check(compiled, x, measure=False)
    assert {each.name for each in found.differences} == {"result", "gradient of links"}


class Made(OrderedDict[str, Any]):
    """Gives a new object of the class that it holds, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


ACTIVATIONS = Made(bare=nn.Tanh, needing=nn.Linear)


@contextmanager
def marked() -> Iterator[None]:
    yield


class Holding(Net):
    """Holds such a table, and a method that a context manager decorates."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.act, self.kinds = ACTIVATIONS, ACTIVATIONS["bare"], list[int]

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"acted": self.act(super().forward(x)["h"])}

    @marked()
    def fresh(self) -> None:
        """Is not called."""


def test_tables_that_make_what_they_give_and_decorated_methods_are_left_as_they_are() -> None:
    torch.manual_seed(0)
    net = Holding().double()
    model = torch.compile(net, backend="reroll", options={"lowering": "eager"})
    assert reroll.check(model, torch.randn(12, 3, 4, dtype=torch.float64), strict=True, measure=False).equal
    assert dict.__getitem__(net.table, "needing") is nn.Linear


def test_a_loop_that_computes_in_half_precision_is_compared_as_such() -> None:
    torch.manual_seed(0)
    model, x = Half(), torch.randn(40, 4, 3)
    fast = reroll.compile(model, lowering="eager", schedule="standard")
    found = reroll.check(fast, x, measure=False)
    assert found.equal
    assert found.error > 1e-4
    assert not reroll.check(fast, x, measure=False, tolerance=1e-4).equal
