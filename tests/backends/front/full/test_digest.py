"""What a record says is compared with what a later one of the same call says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import reroll
from networks_zoo import Net, load
from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.full.digest import Digest
from reroll.backends.front.python_state.state_cache import Reach
from reroll.backends.front.recorded import Recorded
from reroll.capture.folded import UNFOLD
from reroll.capture.recorder.graph import Unrecordable
from rnns import Bodied

T, B, N, H = 60, 2, 3, 4
ZOO = load()
SOME = [*ZOO][::6]


class Slope(torch.autograd.Function):
    """Its forward leaves a number for its backward."""

    number = 0.5

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.number = Slope.number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        found: Tensor = grads[0] * ctx.number
        return found


class Stepped(nn.Module):
    """A step with a number of its own at step ``at``; ``grows``: numbers of others grow."""

    def __init__(self, at: int = -1, grows: int = 0) -> None:
        super().__init__()
        self.cell = nn.RNNCell(N, H)
        self.at, self.grows = at, grows

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(B, H)
        for t in range(len(x)):
            h = self.cell(x[t], h)
            if t == self.at:
                h = h * 3  # the step apart
            h = h + self.grows * t
        return h


def recorded(recorder: Recorded, x: Tensor) -> tuple[Digest, torch.fx.GraphModule]:
    module, _ = recorder.record(Call((x,), {}), Reach().ran)
    return Digest.of(module.graph), module


def departure(one: nn.Module, other: nn.Module, x: Tensor) -> tuple[str, bool]:
    """Where records of two models differ, and whether runs are left out in both."""
    made = [recorded(Recorded(each, folds=True), x) for each in (one, other)]
    folded = all(UNFOLD in module.meta for _, module in made)
    return made[0][0].departure(made[1][0], made[1][1].graph), folded


@pytest.mark.parametrize("at", [3, 20, 31, 40, 58])
@pytest.mark.parametrize("before", [-1, 30])
def test_the_line_is_named_behind_runs_that_are_left_out_too(at: int, before: int) -> None:
    found, folded = departure(Stepped(before), Stepped(at), torch.randn(T, B, N))
    assert folded
    assert "test_digest.py" in found
    assert "the step apart" in found or before >= 0  # where the other one has it, this one does not


def test_numbers_that_grow_otherwise_are_told_apart() -> None:
    found, folded = departure(Stepped(grows=2), Stepped(grows=3), torch.randn(T, B, N))
    assert folded
    assert "h = h + self.grows * t" in found


def test_what_a_function_leaves_for_its_backward_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Bodied(lambda net, x: Slope.apply(net.states(x)[-1]))  # type: ignore[no-untyped-call]
    recorder, x = Recorded(model, folds=True), torch.randn(T, B, 3)
    before, _ = recorded(recorder, x)
    monkeypatch.setattr(Slope, "number", 0.25)
    after, module = recorded(recorder, x)
    assert "Slope.apply" in before.departure(after, module.graph)


@pytest.mark.parametrize("name", SOME)
def test_two_records_of_a_call_say_the_same(name: str) -> None:
    torch.manual_seed(0)
    model, args = Net(ZOO[name]), ZOO[name].inputs(T)
    recorder = Recorded(model, folds=True)
    try:
        made = [recorder.record(Call(args, {}), Reach().ran) for _ in range(2)]
    except Unrecordable as error:
        pytest.skip(str(error))
    one, other = (Digest.of(module.graph) for module, _ in made)
    assert one.departure(other, made[1][0].graph) == ""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths at which Python has run a model."""
    run, found = Call.run, list[int]()

    def noted(self: Call, model: Callable[..., Any]) -> Any:
        found.append(len(self.args[0]))
        return run(self, model)

    monkeypatch.setattr(Call, "run", noted)
    return found


SCALE = torch.tensor(2.0)


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def only_long(net: Any, x: Tensor) -> Tensor:
    h: Tensor = net.states(x)[-1]
    return scaled(h) if len(x) > 8 else h


@pytest.mark.usefixtures("unproved")
def test_python_runs_once_at_a_later_length(runs: list[int]) -> None:
    run = reroll.compile(Bodied(lambda net, x: net.states(x)[-1]), lowering="eager")
    for steps in (5, 6, 7):
        run(torch.randn(steps, B, 3))
    assert runs == [5, 5, 6, 7]


@pytest.mark.usefixtures("unproved")
def test_it_runs_again_where_other_code_runs_whose_globals_are_read(runs: list[int]) -> None:
    model = Bodied(only_long)
    run = reroll.compile(model, lowering="eager")
    for steps in (6, 12):
        x = torch.randn(steps, B, 3)
        torch.testing.assert_close(run(x), model(x))
    assert runs == [6, 6, 12, 12]
    with mock.patch.dict(globals(), SCALE=torch.tensor(3.0)):
        torch.testing.assert_close(run(x), model(x))
    torch.testing.assert_close(run(x), model(x))
