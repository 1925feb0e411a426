"""Loops that run layer after layer become one loop, and give what eager gives.

Shape letters: T steps, B batch, H neurons.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import reroll
import reroll.passes.loop.fuse_loops as fusion
from agreement import sizes
from layers import (
    B,
    H,
    Layer,
    Leaky,
    Net,
    Spiking,
    T,
    batch_first,
    between,
    chain,
    check,
    convolved,
    flat,
    gathered,
    halves,
    kept,
    readout,
    skipped,
    spread,
    with_input,
)
from reroll.graph.effects import example
from reroll.recurrence import Capture

FUSED: dict[str, tuple[Net, int]] = {
    "two": (Net(chain, Layer(False), Layer(False)), 2),
    "two recurrent": (Net(chain, Layer(), Layer()), 2),
    "three": (Net(chain, Layer(), Layer(False), Leaky()), 3),
    "linear": (Net(between, Layer(), nn.Linear(H, H), Layer()), 2),
    "shorter first": (Net(between, Layer(), nn.Linear(H, H), Leaky()), 2),
    "shorter second": (Net(between, Leaky(), nn.Linear(H, H), Layer(False)), 2),
    "flat linear": (Net(flat, Layer(), nn.Linear(H, H), Layer()), 2),
    "flat convolution": (Net(convolved, Layer(), nn.Conv2d(1, 1, 3, padding=1), Layer(False)), 2),
    "layer norm": (Net(between, Layer(), nn.LayerNorm(H), Layer()), 2),
    "input read again": (Net(with_input, Layer(), nn.Linear(2 * H, H), Layer()), 2),
    "first sequence returned": (Net(kept, Layer(), nn.Linear(H, H), Layer()), 2),
    "skip connection": (Net(skipped, Layer(), Layer(False), Leaky()), 3),
    "two producers": (Net(gathered, Layer(), Leaky(), Layer()), 3),
    "two consumers": (Net(spread, Layer(), Leaky(), Layer()), 3),
    "batch first": (Net(batch_first, Layer(), nn.Linear(H, H), Layer()), 2),
    "chunks": (Net(halves, Layer(), Layer()), 2),
    "all but the last step": (Net(lambda x, a, b: b(a(x)[:-1]), Leaky(), Leaky()), 2),
    "all but the first step": (Net(lambda x, a, b: b(a(x)[1:]), Leaky(), Leaky()), 2),
    "random first": (Net(chain, Layer(dropout=0.4), Layer()), 2),
    "readout": (Net(readout, Layer(), Layer(), nn.Linear(H, 2)), 3),  # with the sum of its loss
    "evaluated batch norm": (Net(flat, Layer(), nn.BatchNorm1d(H), Layer()).eval(), 2),
    "evaluated dropout": (Net(between, Layer(), nn.Dropout(0.5), Layer(dropout=0.5)).eval(), 2),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str) -> None:
    model, layers = FUSED[name]
    made = check(model, torch.randn(T, B, H))
    ((steps, carries),) = sizes([made])
    assert steps >= T - 2
    assert carries == layers
    assert not made.notes


def frozen(x: Tensor, first: nn.Module, second: nn.Module) -> Any:
    with torch.no_grad():
        y = first(x)
    return second(y)


SEPARATE: dict[str, tuple[Net, str]] = {
    "batch norm": (Net(flat, Layer(), nn.BatchNorm1d(H), Layer()), "batch_norm at .* takes its statistics over all"),
    "dropout": (Net(between, Layer(), nn.Dropout(0.3), Layer()), "dropout at .* draws the random numbers of all"),
    "sum over time": (Net(lambda x, a, b: b(a(x).cumsum(0)), Leaky(), Leaky()), "cumsum at .* each time step alone"),
    "softmax over time": (Net(lambda x, a, b: b(a(x).softmax(0)), Leaky(), Leaky()), "softmax at .* alone"),
    "time and batch mixed": (
        Net(lambda x, a, b: b(a(x).transpose(0, 1).reshape(x.shape)), Leaky(), Leaky()),
        "reshape at .* alone",
    ),
    "neighbours": (Net(lambda x, a, b: b((lambda y: y[1:] + y[:-1])(a(x))), Leaky(), Leaky()), "add at .* alone"),
    "reverse": (Net(chain, Leaky(), Layer(False, order=-1)), "reads the steps of the first in another order"),
    "last state": (Net(lambda x, a, b: b(x, a(x)[-1]), Layer(), Layer()), "single steps of the first"),
    "mean": (Net(lambda x, a, b: b(x, a(x).mean(0)), Layer(), Layer()), "mean at .* alone"),
    "half of the steps": (Net(lambda x, a, b: b(a(x)[: T // 2]), Leaky(), Leaky()), "not run over the same steps"),
    "random twice": (Net(chain, Layer(dropout=0.4), Layer(dropout=0.4)), "both draw random numbers"),
    "no gradients": (Net(frozen, Layer(), Layer()), "in different gradient or autocast modes"),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", SEPARATE)
def test_not_fused(name: str) -> None:
    model, note = SEPARATE[name]
    made = check(model, torch.randn(T, B, H))
    assert len(made.recurrences) == 2
    assert len(made.notes) == 1
    with pytest.raises(AssertionError, match=note):
        raise AssertionError(made.notes[0].replace("\n", " "))


def test_no_pair_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    legal = fusion._legal

    def noted(found: Capture, before: fx.Node, first: Any, second: Any, rows: Any) -> Any:
        tried.append((first, second))
        return legal(found, before, first, second, rows)

    def run(x: Tensor, norm: nn.Module, *layers: nn.Module) -> Tensor:
        for layer in layers:
            x = layer(norm(x.flatten(0, 1)).view(x.shape) if layer in (layers[1], layers[3]) else x) + x
        return x

    monkeypatch.setattr(fusion, "_legal", noted)
    layers = (Leaky(), Layer(False), Layer(), Leaky(), Layer(False))
    made = check(Net(run, nn.BatchNorm1d(H), *layers), torch.randn(T, B, H))
    assert [len(each.carries) for each in made.recurrences] == [1, 2, 2]
    assert len(tried) == len(set(tried)) > 4


def test_explain_says_what_was_not_fused_and_where() -> None:
    model = Net(flat, Layer(), nn.BatchNorm1d(H), Layer())
    fast = torch.compile(model, backend="reroll", options={"lowering": "eager"})
    report = reroll.explain(fast, torch.randn(T, B, H))
    assert len(report.loops) == 2
    text = " ".join(str(report).split())
    assert "were not fused" in text
    assert "batch_norm" in text
    assert "takes its statistics over all time steps at once" in text
    assert text.count("layers.py") >= 3  # both loops and the batch norm


def long_values(found: Capture, steps: int) -> list[str]:
    """What the graph around the loops makes for nearly all steps."""
    values = {node.name: example(node) for node in found.outer.nodes if node.op.startswith("call")}
    return [name for name, value in values.items() if value is not None and max(value.shape, default=0) >= steps - 2]


def test_nothing_of_all_steps_is_between_the_layers() -> None:
    made = check(Net(flat, Layer(), nn.Linear(H, H), Layer()), torch.randn(T, B, H))
    assert made.outer.output_node().all_input_nodes[0].name in long_values(made, T)
    assert len(long_values(made, T)) <= 3  # the rows of the last layer, with those that were peeled on either side
    assert len(made.recurrences[0].ys) == 1


def fed(x: Tensor, layer: nn.Module, linear: nn.Module, other: nn.Module) -> Any:
    return layer(linear(x).relu()), other(linear(x.flatten(0, 1)).view(x.shape).transpose(0, 1).transpose(1, 0))


def test_the_input_is_read_by_the_step_itself() -> None:
    made = check(Net(fed, Layer(), nn.Linear(H, H), Layer(False, order=-1)), torch.randn(T, B, H))
    assert len(made.recurrences) == 2
    assert all(
        made.outer.find_nodes(op="placeholder")[0] in node.args for node in made.outer.find_nodes(op="call_module")
    )
    assert len(long_values(made, T)) == 4  # what is returned, with the rows that were peeled


def test_what_else_reads_the_input_of_a_loop_keeps_it() -> None:
    made = check(Net(lambda x, a, m: (a(y := m(x)), y), Layer(), nn.Linear(H, H)), torch.randn(T, B, H))
    (linear,) = (
        node
        for node in made.outer.nodes
        if "linear" in str(node.target) and node in made.outer.output_node().all_input_nodes
    )
    assert len(linear.users) >= 2


def halved(x: Tensor, layer: nn.Module, linear: nn.Module) -> Any:
    y = torch.tanh(x)
    x.mul_(0.5)
    return layer(y) + x, linear(x)


class Remembered(nn.Module):
    """Reads a buffer with a row for every step, and updates it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("past", torch.ones(T, B, H))
        self.past: Tensor

    def forward(self, x_TBH: Tensor) -> Tensor:
        y_TBH: Tensor = self.layer(torch.sigmoid(self.past) * x_TBH)
        self.past.mul_(0.9).add_(y_TBH.detach())
        return y_TBH


@pytest.mark.parametrize("model", [Net(halved, Layer(), nn.Linear(H, H)), Remembered(Layer())])
def test_what_is_updated_in_place_is_read_before(model: nn.Module) -> None:
    made = check(model, torch.randn(T, B, H), leaf=False, calls=2)
    written = [node.args[0] for node in made.outer.nodes if node.target == "copy_"]
    assert len(written) == 1
    assert not any(node in written for call in made.outer.find_nodes(op="call_module") for node in call.args)


def test_a_readout_is_held_instead_of_the_states() -> None:
    made = check(Net(readout, Layer(), Layer(), nn.Linear(H, 2)), torch.randn(T, B, H))
    shapes = {
        tuple(value.shape[2:]) for node in made.outer.nodes if (value := example(node)) is not None and value.dim() == 3
    }
    assert (2,) in shapes
    assert all("linear" in name or "select" in name for name in made.recurrences[0].ys)


def test_gradients_of_frozen_and_unused_parts_stay_none() -> None:
    model = Net(kept, Layer(), nn.Linear(H, H), Layer()).double()
    fast = torch.compile(model, backend="reroll", options={"lowering": "eager"})
    x = torch.randn(T, B, H, dtype=torch.float64)
    first, middle, last = model.parts
    fast(x)[0].sum().backward()  # the loss reads the first layer only
    assert all(p.grad is not None for p in first.parameters())
    assert all(p.grad is None for part in (middle, last) for p in part.parameters())
    for p in first.parameters():
        p.requires_grad_(False)
    model.zero_grad()
    fast(x)[1].sum().backward()
    assert all(p.grad is None for p in first.parameters())
    assert all(p.grad is not None for part in (middle, last) for p in part.parameters())


def test_buffers_that_a_step_updates_stay_right() -> None:
    class Counting(Leaky):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(H))
            self.seen: Tensor

        def forward(self, x_TBH: Tensor) -> Tensor:
            v_BH, out = torch.zeros_like(x_TBH[0]), []
            for t in range(x_TBH.shape[0]):
                v_BH = 0.8 * v_BH + x_TBH[t] * (1 + 0.1 * self.seen)
                self.seen.mul_(0.5).add_(v_BH.detach().mean(0))
                out.append(v_BH)
            return torch.stack(out)

    made = check(Net(between, Counting(), nn.Linear(H, H), Counting()), torch.randn(T, B, H), calls=2)
    assert [len(each.carries) for each in made.recurrences] == [4]


def structure(graph: fx.Graph) -> list[Any]:
    """Operations and where their operands come from, without names and numbers."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    called = {node: str(node.target) if node.op.startswith("call") else node.op for node in graph.nodes}
    return [(called[node], [place[operand] for operand in node.all_input_nodes]) for node in graph.nodes]


@pytest.mark.parametrize("steps", [7, 8, 13])
def test_the_structure_is_the_same_at_every_length(steps: int) -> None:
    found = []
    for length in (steps, 10):
        torch.compiler.reset()
        made = check(Net(flat, Layer(), nn.Linear(H, H), Layer()), torch.randn(length, B, H))
        found.append((structure(made.outer), structure(made.recurrences[0].step.graph)))
    assert found[0] == found[1]


@pytest.mark.parametrize("schedule", ["store_all", "standard", "double"])
def test_spikes(schedule: str) -> None:
    model = Net(flat, Spiking(), nn.Linear(H, H), Spiking())
    made = check(model, torch.randn(20, B, H), schedule=schedule, verify=True)
    assert sizes([made]) == ((20, 2),)


class DropsUnread(nn.Module):
    """Two loops, of which the first drops numbers that nobody reads, and begins with a carry in another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H, dtype=torch.float64) * 0.3)

    def forward(self, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, g, s, rows = start.t().contiguous().t(), start * 0.5, start, []
        for t in range(x.shape[0]):
            row = torch.tanh(x[t])
            torch.nn.functional.dropout(x[t], 0.3)
            h, g = torch.tanh(h @ self.weight + row.cumsum(1)), 0.9 * g + 0.5 * row
            rows.append(row)
        for row in rows:
            s = torch.tanh(row + s @ self.weight)
        return h, g, s


def test_numbers_that_nobody_reads_are_peeled_twice() -> None:
    x, start = torch.randn(T, B, H, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64, requires_grad=True)
    model = torch.compile(DropsUnread(), backend="reroll", options={"lowering": "eager"})
    reroll.check(model, x, start, strict=True, measure=False)


@pytest.mark.inductor
def test_inductor() -> None:
    made = check(Net(readout, Layer(), Layer(), nn.Linear(H, 2)), torch.randn(T, B, H), lowering="inductor")
    assert [len(each.carries) for each in made.recurrences] == [3]  # with the sum of its loss
