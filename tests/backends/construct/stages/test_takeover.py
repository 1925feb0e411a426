"""With ``start="eager"`` compiled segments take over at one training call, whatever else runs; before it nothing is
compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

import reroll
from halves import run_by_torch
from reroll.backends.construct.stages import takeover
from reroll.backends.construct.stages.proof import Proof
from reroll.backends.construct.stages.takeover import CALL, Takeover
from reroll.backends.inductor import lower
from reroll.errors import CompilerMissingError, RerollWarning
from reroll.segment.trace import Traced

DOORS = ["front", "backend"]
LATE = 100  # runs of compiled segments, which are wrong from then on


class Leaky(nn.Module):
    """A recurrence, whose last state is read out."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.back, self.read = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x_BTI: Tensor) -> Tensor:
        h_BN = x_BTI.new_zeros(x_BTI.shape[0], 4)
        for t in range(x_BTI.shape[1]):
            h_BN = torch.tanh(self.taken(x_BTI[:, t]) + 0.5 * self.back(h_BN))
        return self.read(h_BN)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled segments take over as soon as they may, and no other process compiles ahead."""
    monkeypatch.setattr(takeover, "COMPILING", 0.0)
    monkeypatch.setattr(takeover, "_AHEAD", (1 << 30, 0.0))


def through(door: str, model: nn.Module, **how: Any) -> Callable[..., Any]:
    if door != "backend":
        run: Callable[..., Any] = reroll.compile(model, **how)
        return run
    return torch.compile(model, backend="reroll", options=how)


def trained(door: str, calls: int, *, lengths: int = 1, **how: Any) -> list[Tensor]:
    """What a network gives in training, with a call without gradients behind each: outputs, then gradients."""
    torch.manual_seed(0)
    model = Leaky()
    run, seen = through(door, model, **how), []
    for call in range(calls):
        y_BO = run(torch.randn(2, 12 + call % lengths, 3))
        gradients = torch.autograd.grad(y_BO.pow(2).mean(), [*model.parameters()])
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight.sub_(0.1 * gradient)
            run(torch.randn(2, 12, 3))
        seen += [y_BO.detach(), *gradients]
    return seen


@contextmanager
def lowerings() -> Iterator[list[str]]:
    """The lowerings by which segments are made inside, each time that some are."""
    found: list[str] = []
    lowered = lower._lowered

    def noted(traced: Any, lowering: str, products: Any) -> Any:
        found.append(lowering)
        return lowered(traced, lowering, products)

    with mock.patch.object(lower, "_lowered", noted):
        yield found


@pytest.mark.parametrize("lengths", [1, 3])
@pytest.mark.parametrize("door", DOORS)
def test_nothing_is_compiled_before_the_call(door: str, lengths: int) -> None:
    with lowerings() as made:
        found = trained(door, CALL - 2, lengths=1 if door == "backend" else lengths, start="eager")
    assert set(made) == {"eager"}
    expected = trained(door, CALL - 2, lengths=1 if door == "backend" else lengths, lowering="eager")
    assert all(map(torch.equal, found, expected))


@pytest.mark.inductor
@pytest.mark.parametrize("door", DOORS)
def test_compiled_segments_take_over_at_that_call(door: str) -> None:
    with lowerings() as made:
        found = trained(door, CALL + 1, start="eager")
    assert {*made} == {"eager", "inductor"}
    before, eager = 7 * (CALL - 1), trained(door, CALL + 1, lowering="eager")
    assert all(map(torch.equal, found[:before], eager[:before]))
    for mine, other in zip(found[before:], eager[before:], strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("door", DOORS)
def test_compiled_segments_come_when_eager_ones_have_run_as_long(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is a matter of the graphs: with calls twice as long it is half as many, at least the ninth."""

    def calls_until(steps: int) -> int:
        torch.manual_seed(0)
        torch.compiler.reset()
        model, due = Leaky(), mock.Mock(return_value=None)
        run, calls = through(door, model, start="eager"), 0
        with mock.patch.object(Takeover, "_following", due):
            while not due.called:
                run(torch.randn(2, steps, 3)).sum().backward()
                calls += 1
        return calls

    monkeypatch.setattr(takeover, "COMPILING", 0.2)
    short, long = calls_until(12), calls_until(24)
    assert long == calls_until(24)
    assert short > long > CALL
    assert (short - 2) / (long - 2) == pytest.approx(2, abs=0.2)


@pytest.mark.inductor
def test_lengths_share_their_calls() -> None:
    """Three lengths in turn: compiled segments come at the ninth call of all, not of one."""
    with lowerings() as made:
        trained("front", CALL, lengths=3, start="eager")
    assert "inductor" in made


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("refused", [CompilerMissingError("no compiler here"), AssertionError("no compiler here")])
def test_eager_segments_stay_where_no_others_can_be_made(door: str, refused: Exception) -> None:
    """Whatever the error: training goes on."""
    with (
        mock.patch.object(lower, "_need_compiler", side_effect=refused),
        pytest.warns(RerollWarning, match="go on with eager segments.*no compiler here") as told,
    ):
        found = trained(door, CALL + 2, start="eager")
    assert len([each for each in told if "go on with" in str(each.message)]) == 1
    assert all(map(torch.equal, found, trained(door, CALL + 2, lowering="eager")))


@pytest.mark.parametrize("door", DOORS)
def test_a_program_is_proved_once(door: str) -> None:
    """Where compiled segments take over, the loops have been proved."""

    prove = mock.patch.object(Proof, "prove", autospec=True, side_effect=Proof.prove)
    with prove as proofs, mock.patch.object(lower, "_inductor", run_by_torch):
        trained(door, CALL + 1, start="eager", proof="first")
    assert proofs.call_count == 2, "one with gradients, one without"


@pytest.mark.parametrize("door", DOORS)
def test_compiled_segments_are_tried_at_each_call_if_wanted(door: str) -> None:
    """With ``proof="always"``, and where they become wrong after they have taken over."""
    calls = 0

    def worse(graph: fx.GraphModule, traced: Traced, *, backward: bool) -> Any:
        right = lower._eager(traced, None, graph, backward=backward)

        def run(inputs: list[Any]) -> list[Any]:
            nonlocal calls
            calls += not backward
            factor = 1.01 if calls > LATE else 1.0
            return [each if each is None or not each.is_floating_point() else factor * each for each in right(inputs)]

        return run

    with mock.patch.object(lower, "_inductor", worse):
        trained(door, CALL + 1, start="eager", proof="always")
        assert calls < LATE
        with pytest.raises(reroll.ProofError, match="compiled segments do not give"):
            trained(door, CALL + LATE, start="eager", proof="always")


@pytest.mark.parametrize("door", DOORS)
def test_segments_that_give_something_else_do_not_take_over(door: str) -> None:
    """Eager ones stay, which is said once; with ``proof="always"`` it is an error."""

    def wrong(graph: fx.GraphModule, traced: Traced, *, backward: bool) -> Any:
        right = lower._eager(traced, None, graph, backward=backward)
        return (lambda inputs: [None if each is None else 1.01 * each for each in right(inputs)]) if backward else right

    said = "go on with eager segments.*compiled segments do not give what the model's operations give in float64"
    with mock.patch.object(lower, "_inductor", wrong):
        with pytest.warns(RerollWarning, match=said) as told:
            found = trained(door, CALL + 2, start="eager")
        assert len([each for each in told if "go on with" in str(each.message)]) == 1
        with pytest.raises(reroll.ProofError, match="compiled segments do not give"):
            trained(door, CALL + 2, start="eager", proof="always")
    assert all(map(torch.equal, found, trained(door, CALL + 2, lowering="eager")))


@pytest.mark.parametrize("door", DOORS)
def test_what_runs_is_said_once_and_what_it_gained(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at the first training call, and one when compiled segments have run for a few calls."""

    said = list[str]()
    monkeypatch.setattr(takeover, "_MET", {})
    monkeypatch.setattr(takeover, "tell", said.append)
    monkeypatch.setattr(lower, "_inductor", run_by_torch)
    trained(door, CALL + 1, start="eager")
    assert len(said) == 1
    assert "torch's kernels run at first, compiled segments from about training call 9 on" in said[0]
    assert "in place of" not in said[0]
    model = Leaky()
    run = through(door, model, start="eager")
    for batch in (2, 5):
        run(torch.randn(batch, 12, 3)).sum().backward()
    assert ["with states of 5x4 in place of 2x4" in line for line in said] == [False, False, True]
    said.clear()
    torch.compiler.reset()
    trained(door, CALL + 5, start="eager")
    assert len(said) == 2
    assert "compiled segments run now" in said[1]


@pytest.mark.parametrize("door", DOORS)
def test_a_tool_that_looks_has_compiled_segments_run_at_once(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay; what the tool calls is not counted, and the user's next call is proved with the segments tried."""

    monkeypatch.setattr(lower, "_inductor", run_by_torch)
    torch.manual_seed(0)
    model = Leaky()
    run, x_BTI = through(door, model, start="eager"), torch.randn(2, 12, 3)
    run(x_BTI).sum().backward()
    assert reroll.check(run, x_BTI, measure=False).equal
    report = reroll.explain(run, x_BTI)
    assert "inductor segments" in report.text()
    assert "no call with these segments was made yet; before, values and gradients are those" in report.proved
    run(x_BTI).sum().backward()
    assert "compiled segments" in reroll.explain(run, x_BTI).proved
