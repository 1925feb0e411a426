"""Loops that run layer after layer become one loop, and give what eager gives.

Shape letters: T steps, B batch, H neurons.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import reroll
import reroll.backends.dynamo as dynamo
from agreement import compare, sizes
from networks import Spike
from reroll.capture import Capture
from reroll.effects import example
from reroll.fusion import fuse

T, B, H = 9, 2, 4


class Layer(nn.Module):
    """A spiking layer over all of T: ``v = 0.9 v + x (+ Wr z)``, ``z`` a sigmoid of it, subtracted where it resets."""

    def __init__(self, recurrent: bool = True, dropout: float = 0.0, order: int = 1) -> None:
        super().__init__()
        self.recurrent = nn.Linear(H, H) if recurrent else None
        self.dropout, self.order = dropout, order

    def forward(self, x_TBH: Tensor, v_BH: Tensor | None = None) -> Tensor:
        v_BH = x_TBH.new_zeros(x_TBH.shape[1:]) if v_BH is None else v_BH
        z_BH, out = torch.zeros_like(v_BH), []
        for t in range(x_TBH.shape[0])[:: self.order]:
            v_BH = 0.9 * v_BH + x_TBH[t]
            v_BH = v_BH if self.recurrent is None else v_BH + self.recurrent(z_BH)
            z_BH = F.dropout(torch.sigmoid(4 * v_BH), self.dropout, self.training and self.dropout > 0)
            v_BH = v_BH - z_BH
            out.append(z_BH)
        return torch.stack(out)


class Leaky(nn.Module):
    """A leaky sum over all of T, without reset: all of its steps are alike."""

    def forward(self, x_TBH: Tensor) -> Tensor:
        v_BH, out = torch.zeros_like(x_TBH[0]), []
        for t in range(x_TBH.shape[0]):
            v_BH = 0.8 * v_BH + x_TBH[t]
            out.append(v_BH)
        return torch.stack(out)


class Net(nn.Module):
    """Modules, and how they are called."""

    def __init__(self, run: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.parts, self.run = nn.ModuleList(modules), run

    def forward(self, x_TBH: Tensor) -> Any:
        return self.run(x_TBH, *self.parts)


@contextmanager
def fusions() -> Iterator[list[Capture]]:
    """A list that fills with what ``fuse`` gives inside."""
    made: list[Capture] = []

    def fused(found: Capture) -> Capture:
        made.append(fuse(found))
        return made[-1]

    with mock.patch.object(dynamo, "fuse", fused):
        yield made


def check(model: nn.Module, x: Tensor, **options: Any) -> Capture:
    """Compare with eager in float64; give what was fused."""
    with fusions() as made:
        different, _ = compare(model.double(), (x.double(),), **{"schedule": "store_all", **options})
    assert not different
    return made[-1]


def between(x: Tensor, first: nn.Module, middle: nn.Module, second: nn.Module) -> Any:
    return second(middle(first(x)))


def flat(x: Tensor, first: nn.Module, middle: nn.Module, second: nn.Module) -> Any:
    """As SpikingJelly's multi-step layers do: time and batch are one dimension for the layer in the middle."""
    y = first(x)
    return second(middle(y.flatten(0, 1)).view(y.shape[0], y.shape[1], -1))


def convolved(x: Tensor, first: nn.Module, conv: nn.Module, second: nn.Module) -> Any:
    y = conv(first(x).flatten(0, 1).view(-1, 1, 2, 2)).flatten(1)
    return second(F.relu(y, inplace=True).view(x.shape[0], x.shape[1], -1))


def with_input(x: Tensor, first: nn.Module, middle: nn.Module, second: nn.Module) -> Any:
    return second(middle(torch.cat([first(x), x], -1)) + x)


def kept(x: Tensor, first: nn.Module, middle: nn.Module, second: nn.Module) -> Any:
    y = first(x)
    return y, second(middle(y))


def chain(x: Tensor, *layers: nn.Module) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def skipped(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Any:
    y = first(x)
    return third(second(y) + y)


def gathered(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Any:
    return third(first(x) * second(x))


def spread(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Any:
    y = first(x)
    return second(y), third(y)


def batch_first(x: Tensor, first: nn.Module, middle: nn.Module, second: nn.Module) -> Any:
    return second(middle(first(x).transpose(0, 1)).transpose(0, 1))


def halves(x: Tensor, first: nn.Module, second: nn.Module) -> Any:
    a, b = first(x).chunk(2, -1)
    return second(torch.cat([b, a.softmax(-1)], -1))


def readout(x: Tensor, first: nn.Module, second: nn.Module, out: nn.Module) -> Any:
    return out(second(first(x))).mean(0)


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
    "readout": (Net(readout, Layer(), Layer(), nn.Linear(H, 2)), 2),
    "evaluated batch norm": (Net(flat, Layer(), nn.BatchNorm1d(H), Layer()).eval(), 2),
    "evaluated dropout": (Net(between, Layer(), nn.Dropout(0.5), Layer(dropout=0.5)).eval(), 2),
}


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


@pytest.mark.parametrize("name", SEPARATE)
def test_not_fused(name: str) -> None:
    model, note = SEPARATE[name]
    made = check(model, torch.randn(T, B, H))
    assert len(made.recurrences) == 2
    assert len(made.notes) == 1
    with pytest.raises(AssertionError, match=note):
        raise AssertionError(made.notes[0].replace("\n", " "))


def test_explain_says_what_was_not_fused_and_where() -> None:
    model = Net(flat, Layer(), nn.BatchNorm1d(H), Layer())
    fast = torch.compile(model, backend="reroll", options={"lowering": "eager"})
    report = reroll.explain(fast, torch.randn(T, B, H))
    assert len(report.loops) == 2
    text = " ".join(str(report).split())
    assert "were not fused" in text
    assert "batch_norm" in text
    assert "takes its statistics over all time steps at once" in text
    assert text.count("test_fusion.py") >= 3  # both loops and the batch norm


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


class Spiking(Layer):
    """With spikes and their surrogate gradient."""

    def forward(self, x_TBH: Tensor, v_BH: Tensor | None = None) -> Tensor:
        v_BH, out = x_TBH.new_zeros(x_TBH.shape[1:]), []
        for t in range(x_TBH.shape[0]):
            v_BH = 0.9 * v_BH + 3 * x_TBH[t]
            z_BH = Spike.apply(v_BH)  # type: ignore[no-untyped-call]
            v_BH = v_BH - z_BH
            out.append(z_BH)
        return torch.stack(out)


@pytest.mark.parametrize("schedule", ["store_all", "standard", "double"])
def test_spikes(schedule: str) -> None:
    model = Net(flat, Spiking(), nn.Linear(H, H), Spiking())
    made = check(model, torch.randn(20, B, H), schedule=schedule, verify=True)
    assert sizes([made]) == ((19, 2),)


@pytest.mark.inductor
def test_inductor() -> None:
    made = check(Net(readout, Layer(), Layer(), nn.Linear(H, 2)), torch.randn(T, B, H), lowering="inductor")
    assert [len(each.carries) for each in made.recurrences] == [2]


ROWWISE: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh,
    lambda y: y.flatten(0, 1).mul(0.5).view(y.shape),
    lambda y: F.relu(y - 0.2) + y,
    lambda y: y.permute(1, 0, 2).softmax(-1).permute(1, 0, 2),
    lambda y: y.transpose(0, 2).contiguous().transpose(2, 0),
    lambda y: y.unsqueeze(-1).expand(-1, -1, -1, 3).mean(-1),
    lambda y: y.reshape(*y.shape[:2], 2, 2).amax(-1, keepdim=True).expand(*y.shape[:2], 2, 2).flatten(2),
    lambda y: torch.cat([y[..., 1:], y[..., :1]], -1),
    lambda y: y - y.mean(1, keepdim=True),
    lambda y: torch.stack([y, y * y], 1).sum(1),
    lambda y: y.flip(-1).clone().mul_(2),
    lambda y: y.cumsum(2).narrow(2, 0, 4).clamp(max=2.0),
    lambda y: torch.where(y > 0.5, y, 0.1 * y),
    lambda y: F.avg_pool2d(y.flatten(0, 1).view(-1, 1, 2, 2), 1).squeeze(1).view(y.shape),
)
MIXING: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda y: y.flip(0),
    lambda y: y - y.mean(0),
    lambda y: y.transpose(0, 1).reshape(y.shape),
    lambda y: y.roll(1, 0),
    lambda y: torch.cat([y[1:], y[:1]]),
)


@pytest.mark.parametrize("seed", range(6))
def test_random_stacks(seed: int) -> None:
    """Random layers with random operations between: right at every batch size, that of as many items as steps too."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    depth = draw.choice((2, 2, 3))
    layers = [draw.choice((Layer, lambda: Layer(False), Leaky))() for _ in range(depth)]
    ops = [[draw.choice(ROWWISE) for _ in range(draw.randint(0, 3))] for _ in range(depth)]
    mixes = draw.random() < 0.3
    if mixes:
        ops[1].insert(draw.randint(0, len(ops[1])), draw.choice(MIXING))

    def run(x: Tensor, *parts: nn.Module) -> Tensor:
        for part, between_them in zip(parts, ops, strict=True):
            for op in between_them:
                x = op(x)
            x = part(x)
        return x

    steps = draw.choice((7, 9, 12))
    options = ({"schedule": "standard"}, {"schedule": "double", "chunk": 5, "slots": 2, "verify": True})[seed % 2]
    made = check(Net(run, *layers), torch.randn(steps, draw.choice((1, 2, steps)), H), **options)
    assert len(made.recurrences) == 1 + mixes
