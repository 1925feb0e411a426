"""Programs of one model at several lengths share what is made for them, where they do the same, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.construct import kernels
from reroll.backends.construct.stages import takeover
from reroll.backends.construct.stages.proof import Proof
from reroll.backends.construct.stages.takeover import CALL
from reroll.backends.front.full.alike import Outline
from reroll.backends.inductor.half import compile_half
from reroll.backends.inductor.sizes import family
from reroll.segment.trace import trace

pytestmark = pytest.mark.usefixtures("double_precision")
EAGER: dict[str, Any] = {"lowering": "eager"}
B, N, H = 2, 3, 4
LENGTHS = (23, 36, 13, 29, 23, 9, 5)
Change = Callable[["Net", int, int, Tensor], Tensor]


class Settings:
    """What a function of the user's reads, and a script sets."""

    slope = 2.0


class Steep(torch.autograd.Function):
    """A step function, whose gradient is that of a line."""

    slope = 3.0

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return (v > 0).to(v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * Settings.slope * Steep.slope * FACTOR


FACTOR = 1.0


def stays(_net: Net, _t: int, _steps: int, h: Tensor) -> Tensor:
    return h


class Net(nn.Module):
    """A cell over time, with a change to each state."""

    def __init__(self, change: Change = stays, dim: int = 0) -> None:
        super().__init__()
        self.cell, self.out, self.change, self.dim = nn.GRUCell(N, H), nn.Linear(H, 2), change, dim
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Readouts of every step."""
        h, found = x.new_zeros(B, H), []
        for t in range(x.shape[self.dim]):
            h = self.change(self, t, x.shape[self.dim], self.cell(x.select(self.dim, t), h))
            found.append(self.out(h) * self.scale)
        return torch.stack(found)


def fires(_net: Net, _t: int, _steps: int, h: Tensor) -> Tensor:
    return h + Steep.apply(h - 0.1)  # type: ignore[no-any-return, no-untyped-call]


def doubles_where_long(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return h * 2 if steps > 25 else h


def by_length(_net: Net, t: int, steps: int, h: Tensor) -> Tensor:
    return h * (1 - 1 / steps) + 0.9 ** (steps - t)


def scales(net: Net, _t: int, _steps: int, h: Tensor) -> Tensor:
    return h * net.scale


def drops(net: Net, _t: int, _steps: int, h: Tensor) -> Tensor:
    return nn.functional.hardtanh(h, -net.scale, net.scale)


def sequence(net: Net, steps: int) -> Tensor:
    return torch.randn((steps, B, N) if net.dim == 0 else (B, steps, N))


def trained_alike(run: Any, net: Net, steps: int) -> None:
    """Whether a call gives what the plain model gives, and gradients."""
    plain, x, found = copy.deepcopy(net), sequence(net, steps), list[Any]()
    for each, model in ((run, net), (plain, plain)):
        given = x.clone().requires_grad_()
        y = each(given)
        y.square().sum().backward()
        found.append([y.detach(), given.grad, *(value.grad for value in model.parameters())])
        model.zero_grad()
    torch.testing.assert_close(*found)


@contextmanager
def made() -> Iterator[list[str]]:
    """What is traced and compiled inside."""
    found = list[str]()

    def traced(recurrence: Any, steps: int, **how: Any) -> Any:
        found.append(f"trace {steps}")
        return trace(recurrence, steps, **how)

    def compiled(*given: Any, **how: Any) -> Any:
        found.append("compile")
        return compile_half(*given, **how)

    with mock.patch.object(kernels, "trace", traced), mock.patch.object(family, "compile_half", compiled):
        yield found


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("change", [stays, fires])
def test_nothing_is_traced_at_another_length(change: Change, dim: int) -> None:
    net = Net(change, dim)
    run = reroll.compile(net, **EAGER)
    with made() as first:
        trained_alike(run, net, LENGTHS[0])
    assert first == ["trace 4", "trace 1"]
    with made() as others:
        for steps in LENGTHS[1:]:
            trained_alike(run, net, steps)
    assert others == []


def test_only_what_is_missing_is_traced() -> None:
    net = Net()
    run = reroll.compile(net, **EAGER)
    with made() as found:
        for steps in (20, 32, 21, 23, 40):
            trained_alike(run, net, steps)
    assert found == ["trace 4", "trace 1"]


@pytest.mark.inductor
@pytest.mark.parametrize("dim", [0, 1])
def test_nothing_is_compiled_at_another_length(dim: int) -> None:
    net = Net(fires, dim)
    run = reroll.compile(net, start="compiled")
    trained_alike(run, net, 41)
    with made() as others:
        for steps in (33, 23):
            trained_alike(run, net, steps)
    assert "compile" not in others
    assert all(each in ("trace 4", "trace 1") for each in others)  # of eager segments, for a proof


@pytest.mark.inductor
def test_a_new_length_goes_on_with_what_took_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "COMPILING", 0.0)
    monkeypatch.setattr(takeover, "_AHEAD", (1 << 30, 0.0))
    net = Net()
    run: Any = reroll.compile(net, start="eager")
    for call in range(CALL + 1):
        trained_alike(run, net, 17 + call % 2)
    with made() as others:
        trained_alike(run, net, 29)
    (program,) = [each.run for each in run.reroll_caller.at_length.recorded.recordings.values()][-1:]
    assert program.takeover.compiled
    assert {each.kernels.context.lowering for each in program.graph.built} == {"inductor"}
    assert others == []


@pytest.mark.parametrize("change", [doubles_where_long, by_length, stays, fires])
def test_a_step_may_be_another_one_at_another_length(change: Change) -> None:
    net = Net(change)
    run = reroll.compile(net, **EAGER)
    for steps in LENGTHS:
        trained_alike(run, net, steps)


@pytest.mark.parametrize("change", [scales, drops])
def test_a_number_of_the_model_may_change_between_lengths(change: Change) -> None:
    net = Net(change)
    run = reroll.compile(net, **EAGER)
    for steps, scale in zip(LENGTHS, (1.0, 0.5, 0.5, 1.0, 1, True, 0.1), strict=True):
        net.scale = scale
        trained_alike(run, net, steps)


@pytest.mark.parametrize("where", ["a class", "the function", "a global", "a closure"])
def test_what_a_gradient_reads_may_change_between_lengths(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slope = 1.0

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            return (v > 0).to(v)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * slope

    def own(_net: Net, _t: int, _steps: int, h: Tensor) -> Tensor:
        return h + Own.apply(h - 0.1)  # type: ignore[no-any-return, no-untyped-call]

    net = Net(own if where == "a closure" else fires)
    run = reroll.compile(net, proof="never", **EAGER)
    for steps, value in zip((21, 30, 17, 21, 9), (1.0, 1.0, 5.0, 5.0, 7.0), strict=True):
        slope = value if where == "a closure" else slope
        if where in ("a class", "the function"):
            monkeypatch.setattr(Settings if where == "a class" else Steep, "slope", value)
        if where == "a global":
            monkeypatch.setitem(globals(), "FACTOR", value)
        trained_alike(run, net, steps)


def test_modes_and_kinds_of_numbers_are_apart() -> None:
    net = Net(fires)
    run = reroll.compile(net, **EAGER)
    trained_alike(run, net, 41)
    with torch.no_grad():
        x = sequence(net, 30)
        torch.testing.assert_close(run(x), net(x))
    trained_alike(run, net, 17)
    net.float()
    with torch.no_grad():
        torch.testing.assert_close(run(x.float()), net(x.float()))
    net.double()
    trained_alike(run, net, 33)
    net.requires_grad_(False)
    net.out.requires_grad_(True)
    trained_alike(run, net, 35)


def test_two_models_are_apart() -> None:
    nets = [Net(fires), Net(scales)]
    nets[1].scale = 0.5
    runs = [reroll.compile(each, **EAGER) for each in nets]
    for steps in (21, 30, 13):
        for run, net in zip(runs, nets, strict=True):
            trained_alike(run, net, steps)


def proved(net: Net, lengths: tuple[int, ...]) -> list[int]:
    """The lengths whose programs are proved."""
    run, found = reroll.compile(net, **EAGER), list[int]()
    prove = Proof.prove

    def noted(proof: Proof, *given: Any) -> None:
        found.append(steps)
        prove(proof, *given)

    with mock.patch.object(Proof, "prove", noted):
        for steps in lengths:
            trained_alike(run, net, steps)
    return found


def test_programs_like_those_that_were_proved_need_no_proof() -> None:
    assert proved(Net(), (21, 13, 29, 10, 21, 14, 15, 16, 30, 31)) == [21, 13, 10, 30]


def test_programs_with_something_else_in_them_are_proved() -> None:
    assert proved(Net(doubles_where_long), (21, 13, 17, 29, 33, 9, 37)) == [21, 13, 29, 33, 9]
    assert proved(Net(by_length), (21, 13, 29, 10, 15)) == [21, 13, 29, 10, 15]


def test_a_number_that_is_on_no_line_is_proved() -> None:
    class Half(Net):
        def forward(self, x: Tensor) -> Tensor:
            """The last half of the readouts."""
            return super().forward(x)[x.shape[0] // 2 :]

    assert proved(Half(), (20, 14, 26, 10, 27, 30, 31)) == [20, 14, 10, 27, 31]


@pytest.mark.parametrize(
    ("numbers", "table", "like"),
    [
        ((5, 20, 11), (1.0, 2.0), True),
        ((5, 20, 10), (1.0, 2.0), False),
        ((6, 20, 11), (1.0, 2.0), False),
        ((5, 10, 6), (1.0, 2.0, 3.0), True),
        ((5, 20, 11), (1.0, 3.0), False),
        ((5, 20, 11), (1.0, 2.0, 3.0, 4.0, 5.0), False),
    ],
)
def test_which_outlines_follow_two_others(numbers: tuple[int, ...], table: tuple[float, ...], like: bool) -> None:
    one, other = Outline("", (5, 10, 6), ((1.0, 2.0, 3.0),), 10), Outline("", (5, 30, 16), ((1.0, 2.0, 3.0, 4.0),), 30)
    assert Outline("", numbers, (table,), numbers[1]).follows(one, other) is like
