"""Pieces around a loop that inductor compiles: parameters that no used result reads have no gradient.
torch's own checkpoints in a step of which the first or the last is run by torch: dropout in them keeps its mask."""

from __future__ import annotations

import operator
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import reroll
from reroll.backends.dynamo import outer_compile
from reroll.errors import UnsupportedError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
D = torch.float64


class Double(torch.autograd.Function):
    """Twice a value, and no gradient for its scale."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, None


class Heads(nn.Module):
    """A loop behind a wide layer, with two wide heads, one of which reads the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.cell = nn.Linear(4, 64), nn.Linear(64, 4)
        self.value, self.other = nn.Linear(4, 64), nn.Linear(4, 64)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        wide, h, states = torch.tanh(self.before(x.flip(0))), x.new_zeros(3, 4), []
        for t in range(x.shape[0]):
            h = torch.tanh(self.cell(wide[t]) + h)
            states.append(h)
        y = torch.stack(states)
        double: Any = Double.apply
        heads = {"value": torch.tanh(self.value(double(y, self.scale))), "other": torch.tanh(self.other(x))}
        return {"states": y, "wide": wide, **heads}


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "all": lambda result: torch.stack([each.square().mean() for each in result.values()]).sum(),
    **{name: lambda result, name=name: result[name].square().mean() for name in ("states", "wide", "value", "other")},  # type: ignore[misc]
    "two": lambda result: result["wide"].sum() + result["other"].square().sum(),
}


@needs_compiler
@pytest.mark.parametrize("door", ["backend", "compile"])
def test_what_no_used_result_reads_has_no_gradient(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_piece = list[fx.GraphModule](), outer_compile._compiled

    def noted(piece: fx.GraphModule) -> nn.Module:
        compiled.append(piece)
        return compile_piece(piece)

    monkeypatch.setattr(outer_compile, "_compiled", noted)
    torch.manual_seed(0)
    net, x = Heads().to(D), torch.randn(12, 3, 4, dtype=D, requires_grad=True)
    model = torch.compile(net, backend="reroll") if door == "backend" else reroll.compile(net)
    for loss in LOSSES.values():
        reroll.check(model, x, loss=loss, strict=True, measure=False)
    assert compiled


class Delayed(nn.Module):
    """A carry that needs a gradient from its second step on, all steps of which a head and a second loop read."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.w = nn.Linear(4, 64), nn.Parameter(torch.randn(4, 4) * 0.3)

    def forward(self, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        late, early, states, h = torch.zeros(3, 4, dtype=D), torch.zeros(3, 4, dtype=D), [], start
        for x_t in x.unbind():
            late, early = 0.9 * late + 0.5 * early, 0.9 * early + 0.5 * x_t
            states.append(late)
        for state in states:
            h = torch.tanh(state + h @ self.w)
        return h, torch.tanh(self.wide(torch.stack(states, 1))), torch.cat(states)


@needs_compiler
def test_rows_of_which_the_first_needs_no_gradient() -> None:
    torch.manual_seed(0)
    net, start = Delayed().to(D), torch.randn(3, 4, dtype=D, requires_grad=True)
    x = torch.randn(9, 3, 4, dtype=D, requires_grad=True)
    reroll.check(torch.compile(net, backend="reroll"), x, start, strict=True, measure=False)


@needs_compiler
def test_a_piece_without_a_gradient_that_is_needed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_piece = outer_compile._compiled

    def mistaken(piece: fx.GraphModule) -> nn.Module:
        for node in piece.graph.find_nodes(op="placeholder"):
            if not node.meta["example_value"].is_leaf or node.name.startswith("getitem"):
                node.meta["example_value"] = node.meta["example_value"].detach()
        return compile_piece(piece)

    monkeypatch.setattr(outer_compile, "_compiled", mistaken)
    model, start = torch.compile(Delayed().to(D), backend="reroll"), torch.randn(3, 4, dtype=D)
    with pytest.raises(UnsupportedError, match="compiled without a gradient"):
        model(torch.randn(9, 3, 4, dtype=D, requires_grad=True), start)


def test_of_a_pair_both_are_taken_where_it_was_made() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(torch.var_mean, (x, 1))
    state = graph.call_function(operator.getitem, (pair, 0))
    last = graph.call_module("recurrence_0", (state,))
    mean = graph.call_function(operator.getitem, (pair, 1))  # behind the loop, as where two layers were one loop
    graph.output((graph.call_function(torch.add, (last, mean)),))
    value = torch.randn(2, 3)
    for node, example in ((x, value), (pair, torch.var_mean(value, 1)), (state, value[:, 0]), (last, value[:, 0])):
        node.meta["example_value"] = example
    outer = fx.GraphModule({"recurrence_0": nn.Identity()}, graph)
    pieces = outer_compile._split(outer, {"recurrence_0"})
    handed_on = pieces.get_submodule("submod_0")(value)
    assert [type(each) for each in handed_on] == [Tensor, Tensor]
    assert torch.equal(pieces(value)[0], outer(value)[0])


@needs_compiler
def test_what_a_piece_is_given_may_be_expanded() -> None:
    """A row for the whole batch, made before the loop and read behind it: it is compiled for the memory that it has."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row, self.weight = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor, start: Tensor) -> tuple[Tensor, ...]:
            whole, count, rows = self.row.expand(3, 4), torch.zeros(3, dtype=torch.long), []
            for _ in range(1, x.shape[0]):
                count = (count + count) % 4
                rows.append(start)
            return torch.tanh(whole @ self.weight), count, rows[-1]

    model = Biased().to(D)
    compiled = torch.compile(model, backend="reroll", options={"segment": 3})
    reroll.check(compiled, torch.randn(9, 3, 4, dtype=D), torch.randn(3, 4, dtype=D), strict=True, measure=False)


class Leaky(nn.Module):
    """An integrator whose input is dropped out in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)

    def forward(self, x_TBI: Tensor, v_BH: Tensor | None = None) -> Any:
        v_BH, out = x_TBI.new_zeros(x_TBI.shape[1], 6) if v_BH is None else v_BH, []
        for t in range(x_TBI.shape[0]):
            v_BH = v_BH * 0.9 + checkpoint(self.dropped, x_TBI[t], use_reentrant=False)
            out.append(torch.tanh(v_BH))
        return torch.stack(out)

    def dropped(self, x_BI: Tensor) -> Tensor:
        return torch.dropout(self.a(x_BI), 0.3, True)


@pytest.mark.variants(4)
@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("steps", [20, 2])
def test_dropout_in_a_checkpoint_has_the_gradients_of_eager(steps: int, given: bool, way: str) -> None:
    if way == "compile" and torch.__version__ < "2.12":
        pytest.skip("Where operations are recorded, checkpoints of torch 2.11 show other ones at first")
    model, x = Leaky().double(), torch.randn(steps, 3, 4).double()
    state = [torch.randn(3, 6).double()] if given else []
    options: dict[str, Any] = {"lowering": "eager"}
    backend: Any = torch.compile(model, backend="reroll", options=options)
    run = backend if way == "backend" else reroll.compile(model, **options)
    found = list[Any]()
    for each in (run, model, run):
        torch.manual_seed(5)
        with warnings.catch_warnings(action="ignore"):  # two steps are no recurrence
            out = each(x, *state)
        found.append((out.detach(), torch.autograd.grad(out.square().sum(), list(model.parameters()))))
    torch.testing.assert_close(found[2], found[1])
