"""What no short run tells: a model is recorded at the length of the call, and rolled as it stands."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.front.full import at_length
from reroll.capture.recorder.graph import GraphRecorder
from reroll.errors import ProofError, RerollWarning
from rnns import Bodied

pytestmark = pytest.mark.usefixtures("double_precision")
B, N, H = 2, 3, 4
LENGTHS = (40, 13, 5, 6, 9, 21, 40, 77)
EAGER: dict[str, Any] = {"lowering": "eager"}
Body = Callable[["Net", Tensor], Any]


class Net(Bodied):
    """That, and a state."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.seen = torch.zeros(())


def halves(net: Net, x: Tensor) -> Tensor:
    return torch.stack(net.states(x, lambda t, h: h * 0.5 if t == x.shape[0] // 2 else h))


def once(net: Net, x: Tensor) -> Tensor:
    return torch.stack(net.states(x, lambda t, h: h.detach() if t == 27 else h))


def at_first(net: Net, x: Tensor) -> Tensor:
    return torch.stack(net.states(x, lambda t, h: h * min(t, 5)))


def fading(net: Net, x: Tensor) -> Tensor:
    return torch.stack(net.states(x, lambda t, h: h * 0.9**t))


def twice(net: Net, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], H)
    for t in range(x.shape[0]):
        h = net.cell(x[(2 * t) % x.shape[0]], h)
    return h


def shuffled(net: Net, x: Tensor) -> Tensor:
    h, table = x.new_zeros(x.shape[1], H), torch.linspace(0, 1, x.shape[0])
    for t in sorted(range(x.shape[0]), key=lambda t: (7 * t * t + 3 * t) % 13):
        h = net.cell(x[t], h) * table[(t * t) % x.shape[0]]
    return h


def last_half(net: Net, x: Tensor) -> Tensor:
    return torch.stack(net.states(x))[x.shape[0] // 2 :]


def first_rows(net: Net, x: Tensor) -> Tensor:
    return torch.stack(net.states(x))[:8].sum(0)


def pieces(net: Net, x: Tensor) -> list[Tensor]:
    return [piece.sum(0) for piece in torch.stack(net.states(x)).split(5)]


def pieces_of_inputs(net: Net, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], H)
    for piece in x.split(5):
        for row in piece:
            h = net.cell(row, h)
        h = h * 0.5
    return h


def two_rows(net: Net, x: Tensor) -> Tensor:
    found = net.states(x)
    return found[x.shape[0] // 2] + found[-2]


def seldom(net: Net, x: Tensor) -> Tensor:
    return torch.stack(net.states(x, lambda t, h: h.sin() if t % 17 == 16 else h))


BODIES = [
    halves,
    once,
    at_first,
    fading,
    twice,
    shuffled,
    last_half,
    first_rows,
    pieces,
    pieces_of_inputs,
    two_rows,
    seldom,
]


@pytest.mark.parametrize("body", BODIES)
def test_a_step_may_do_anything_with_its_number_and_theirs(body: Body) -> None:
    compiled = reroll.compile(Net(body), **EAGER)
    for steps in LENGTHS:
        reroll.check(compiled, torch.randn(steps, B, N, requires_grad=True), strict=True, measure=False)


@pytest.mark.parametrize("body", [twice, shuffled, last_half])
def test_such_models_are_rolled(body: Body) -> None:
    compiled, x = reroll.compile(Net(body), **EAGER), torch.randn(23, B, N)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (23, 19):
            compiled(x[:steps])
            assert sum(loop.recurrence.steps for loop in reroll.explain(compiled, x[:steps]).loops) >= steps - 4
    assert not compiled.reroll_caller.is_read


def test_a_record_holds_nothing_of_what_it_runs() -> None:
    net, x, made, alive = Net(halves), torch.randn(50, B, N), list[weakref.ref[Tensor]](), list[int]()

    def noted(_: int, h: Tensor) -> Tensor:
        made.append(weakref.ref(h))
        alive.append(sum(each() is not None for each in made))
        return h.tanh()

    recorder = GraphRecorder([x, *net.parameters()], {})
    with recorder.recording():
        last = net.states(x, noted).pop()
    assert len(recorder.finish([last])[0].graph.nodes) > 100
    assert max(alive) <= 2


def test_another_reading_of_what_no_key_sees_is_an_error_at_the_second_call() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        return last_half(net, x) * getattr(__import__("math"), "of_nobody", 1.0)

    compiled, x = reroll.compile(Net(body), **EAGER), torch.randn(24, B, N)
    compiled(x)
    try:
        math.of_nobody = 2.0  # type: ignore[attr-defined]
        with pytest.raises(ProofError, match=r"something else.*test_at_length\.py"):
            compiled(x)
        torch.testing.assert_close(compiled(x), compiled._orig_mod(x))
    finally:
        del math.of_nobody  # type: ignore[attr-defined]


def test_states_buffers_and_random_numbers_are_those_of_the_model() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.norm = nn.RNNCell(N, H), nn.BatchNorm1d(H)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            h, rows = x.new_zeros(x.shape[1], H) if self.last is None else self.last, []
            for t in range(x.shape[0]):
                h = nn.functional.dropout(self.norm(self.cell(x[t], h)), 0.3)
                rows.append(h)
            self.last = h.detach()
            return torch.stack(rows)[x.shape[0] // 3 :]

    net = Stateful()
    twin = copy.deepcopy(net)
    compiled = reroll.compile(twin, **EAGER)
    for steps in (22, 22, 31, 22):
        x, found = torch.randn(steps, B, N), []
        for run, model in ((compiled, twin), (net, net)):
            torch.manual_seed(steps)
            y = run(x)
            grads = torch.autograd.grad(y.square().sum(), list(model.parameters()))
            found.append([y, *grads, *model.buffers(), model.last])
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)
    assert (
        len(compiled.reroll_caller.at_length.recorded.recordings) == 3
    )  # without a state, and of two lengths with one
    assert not compiled.reroll_caller.is_read


def test_copies_of_buffers_that_are_written_back_are_no_loop() -> None:
    """Their originals would be held until a backward, which finds them changed."""

    class Owning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.own = nn.RNNCell(N, H), nn.ModuleList(nn.BatchNorm1d(H) for _ in range(9))

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[1], H)
            for t in range(x.shape[0]):
                h = self.own[t](self.cell(x[t], h))
            return h

    x = torch.randn(9, B, N, requires_grad=True)
    reroll.check(reroll.compile(Owning(), **EAGER), x, strict=True, measure=False)


def test_a_loop_that_ends_by_values_is_right_at_every_end() -> None:
    def converges(net: Net, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], H)
        for t in range(x.shape[0]):
            h = net.cell(x[t], h)
            if h.abs().max() < 0.1 * t:
                break
        return h

    net = Net(converges)
    twin = copy.deepcopy(net)
    compiled = reroll.compile(twin, **EAGER)
    with pytest.warns(RerollWarning, match="asks whether values are true, at File"):
        compiled(torch.randn(30, B, N))
    for steps, scale in ((30, 1.0), (30, 0.01), (17, 1.0)):
        x, found = torch.randn(steps, B, N) * scale, list[Any]()
        for run, model in ((compiled, twin), (net, net)):
            y = run(x)
            found.append([y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))])
        torch.testing.assert_close(*found)


def test_programs_of_so_many_operations_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = reroll.compile(Net(last_half), **EAGER)
    held = compiled.reroll_caller.at_length.recorded.recordings
    monkeypatch.setattr(at_length, "HELD", 100)
    for steps in (20, 21, 22, 60, 20):
        x = torch.randn(steps, B, N)
        torch.testing.assert_close(compiled(x), compiled._orig_mod(x))
    assert len(held) == 1
    monkeypatch.setattr(at_length, "HELD", 10_000)
    for steps in (21, 22):
        compiled(torch.randn(steps, B, N))
    assert len(held) == 3
