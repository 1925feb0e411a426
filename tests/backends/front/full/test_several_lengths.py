"""Programs of one model at several lengths share what is made for them, where they do the same, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import mul
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


def fraction(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return h * (1 - 1 / steps)


def whole(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return steps / (h.square() + 1) + h / steps


def power(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return h * 0.1 ** (1 / steps) + (h.square() + 1) ** (2 / steps)  # type: ignore[no-any-return]


def threshold(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return torch.where(h > 1 / steps, h, h * 0.5) + (h > 0.1) * (3 / steps)


def updated(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return h.clone().mul_(1 / steps).add_(h)


def filling(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return h + torch.full_like(h, 1 / steps) * h.tanh()


def table(_net: Net, t: int, steps: int, h: Tensor) -> Tensor:
    return h * (1 - t / (2 * steps)) - t / 1000


def levels_off(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return h / max(steps, 30) * 20 + 1 / steps


def now_whole(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return h * (1 / steps if steps % 2 else 0)


def rolls(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return h + h.roll(steps % 3, 1) / steps


def sums(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return h + h.sum(steps % 2, keepdim=True) / steps


def takes(_net: Net, _t: int, steps: int, h: Tensor) -> Tensor:
    return h + h[:, : steps % 3 + 1].mean(1, keepdim=True) / steps + h[steps % 2]


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


def traced(run: Any, net: Net, lengths: tuple[int, ...]) -> list[list[str]]:
    """What is traced at each length, at which all is as the plain model has it."""
    found = []
    for steps in lengths:
        with made() as now:
            trained_alike(run, net, steps)
        found.append(now)
    return found


BOTH = ["trace 4", "trace 1"]


@pytest.mark.parametrize("change", [fraction, whole, power, threshold, updated, filling])
def test_a_number_that_differs_is_an_input_from_the_second_length_on(change: Change) -> None:
    net = Net(change)
    assert traced(reroll.compile(net, **EAGER), net, (23, 29, 36, 13, 9, 23, 5)) == [BOTH, BOTH, [], [], [], [], []]


def test_a_number_of_each_step_is_an_input_at_once() -> None:
    net = Net(table)
    assert traced(reroll.compile(net, **EAGER), net, (23, 29, 36, 13, 9)) == [BOTH, [], [], [], []]


def test_a_number_may_differ_at_the_third_length_alone() -> None:
    net = Net(levels_off)
    lengths = (23, 13, 9, 37, 29, 41, 9)
    assert traced(reroll.compile(net, **EAGER), net, lengths) == [BOTH, BOTH, [], BOTH, [], [], []]


def test_whole_numbers_and_others_are_apart() -> None:
    net = Net(now_whole)
    lengths = (23, 22, 13, 34, 29, 38)
    assert traced(reroll.compile(net, **EAGER), net, lengths) == [BOTH, BOTH, BOTH, [], [], []]


@pytest.mark.parametrize("change", [rolls, sums, takes])
def test_sizes_and_dimensions_are_no_inputs(change: Change) -> None:
    net = Net(change)
    found = traced(reroll.compile(net, **EAGER), net, (23, 18, 22, 13, 9, 12, 11, 15, 14))
    assert found[1] == BOTH


def test_a_number_that_a_script_changes_is_an_input() -> None:
    net, found = Net(scales), []
    run = reroll.compile(net, **EAGER)
    for steps, scale in ((23, 1.0), (29, 0.9), (36, 0.81), (13, 1.0)):
        net.scale = scale
        found += traced(run, net, (steps,))
    assert found == [BOTH, BOTH, [], []]


class Averaged(Net):
    """Means of spikes, whose first step stands before the loop, with a number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """A mean over time."""
        v = z = x.new_zeros(B, H)
        mean, steps = x.new_zeros(B, 2), x.shape[0]
        for row in x:
            v = 0.9 * v * (1 - z) + self.cell(row, v)
            z = torch.sigmoid(v - 1.0)
            mean = mean + self.out(z) * (1 / steps)
        return mean * (2 / steps)


class Two(Net):
    """Two loops over a step like the other's but for a number, of which the second reads the first backwards."""

    def forward(self, x: Tensor) -> Tensor:
        """Readouts of every step."""
        ys, steps = [*x], x.shape[0]
        for leak in (0.9, 0.5):
            h, states = x.new_zeros(B, H), []
            for row in ys:
                h = self.cell(row, h) * leak + 1 / steps
                states.append(h[:, :N])
            ys = states[::-1]
        return torch.stack(ys)


def test_loops_over_steps_with_numbers_of_their_own_keep_these() -> None:
    net = Two()
    run: Any = reroll.compile(net, **EAGER)
    assert traced(run, net, (23, 29, 36, 13, 9)) == [BOTH * 2, BOTH * 2, [], [], []]
    for recording in run.reroll_caller.at_length.recorded.recordings.values():
        built = recording.run.graph.built
        assert [leak for each in built for leak in leaks(each.executable.recurrence.step)] == [0.9, 0.5]


def leaks(step: Any) -> list[float]:
    """What a step multiplies by."""
    return [each.args[1] for each in step.graph.nodes if each.target in (torch.mul, mul) and each.args[1] in (0.9, 0.5)]


def as_alone(net: Net, **options: Any) -> list[bool]:
    """Whether anything is traced at some lengths, at which all is to the bit as in a program that knows of no other."""
    run, found = reroll.compile(net, **options, **EAGER), []
    for steps in (23, 29, 13, 37):
        x, alone, results = sequence(net, steps), reroll.compile(net, proof="never", **options, **EAGER), list[Any]()
        for each in (run, alone):
            with made() as now:
                y = each(x)
                net.zero_grad()
                y.square().sum().backward()
            results.append([y.detach(), *(value.grad for value in net.parameters())])
            found += [bool(now)] if each is run else []
        torch.testing.assert_close(*results, rtol=0, atol=0)
    return found


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("change", [fraction, whole, updated, filling])
def test_numbers_in_half_precision(change: Change, kind: torch.dtype) -> None:
    torch.set_default_dtype(kind)
    assert as_alone(Net(change)) == [True, True, False, False]


def test_a_power_in_half_precision_has_no_inputs() -> None:
    torch.set_default_dtype(torch.float16)
    assert as_alone(Net(power)) == [True] * 4


def test_numbers_where_gradients_are_cut() -> None:
    assert as_alone(Net(fraction), truncate=8) == [True, True, False, False]


@pytest.mark.inductor
def test_numbers_in_compiled_segments() -> None:
    net = Net(whole)
    run = reroll.compile(net, start="compiled")
    traced(run, net, (41, 33))
    assert not any("compile" in each for each in traced(run, net, (23, 37, 41)))


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


def test_programs_that_differ_in_a_number_of_all_steps_need_no_proof() -> None:
    assert proved(Net(fraction), (21, 13, 29, 10, 15, 17, 18)) == [21, 13, 29, 15]
    assert proved(Averaged(), (22, 14, 30, 11, 16, 18, 19)) == [22, 14, 30, 16]


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


def test_a_number_of_all_steps_may_be_any() -> None:
    one, other = (Outline("", (steps,), ((1 / steps,) * steps,), steps) for steps in (10, 30))
    assert Outline("", (20,), ((1 / 20,) * 20,), 20).follows(one, other)
    assert not Outline("", (20,), ((1 / 20,) * 19 + (1.0,),), 20).follows(one, other)
