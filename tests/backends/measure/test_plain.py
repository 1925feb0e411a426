"""What plain PyTorch takes, told from a few steps, and that explain says where it is the faster."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.front.compile import Caller
from reroll.backends.measure import explain, plain

COUNTED = [0]


class Counting(nn.Module):
    """A cell over time that counts its steps; one buffer and one random number change at each."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.level: Tensor
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN = x_TBI.new_zeros(x_TBI.shape[1], 4)
        for t in range(x_TBI.shape[0]):
            self.level += 1
            h_BN = nn.functional.dropout(self.cell(x_TBI[t], h_BN), 0.1)
            COUNTED[0] += 1
        return h_BN


def test_a_part_of_what_few_steps_hold_is_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "cpu_seconds_of", counted)
    inputs = (torch.randn(100, 2, 3),)
    half = plain.step_seconds(caller_of(reroll.compile(Counting(), time_dim=0, memory_budget=0.5)), inputs, {})
    assert half.plain is not None
    assert half.compiled is None


def caller_of(compiled: Any) -> Caller:
    """What calls a compiled model."""
    caller: Caller = compiled.reroll_caller
    return caller


def counted(step: Callable[[], object], *_: float) -> float:
    """Steps in place of seconds, and 7 for what is around them."""
    before = COUNTED[0]
    step()
    return 7.0 + COUNTED[0] - before


@pytest.mark.variants(4)
@pytest.mark.parametrize(("length", "known"), [(1_000, True), (70, True), (64, True), (63, False), (9, False)])
def test_two_short_sequences_are_continued(length: int, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "cpu_seconds_of", counted)
    model, x = Counting(), torch.randn(length, 2, 3)
    caller = caller_of(reroll.compile(model, time_dim=0))
    before = torch.get_rng_state()
    found = plain.step_seconds(caller, (x,), {}).plain
    assert found == (pytest.approx(7 + length) if known else None)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.level == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_times_that_fall_with_the_number_of_steps_are_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a busy machine, on which the shorter sequence took longer, gives a negative time."""
    seconds = iter([0.3] * 8 + [0.2] * 8)  # of two that take turns, in four rounds
    monkeypatch.setattr(plain, "cpu_seconds_of", lambda _: next(seconds))
    caller = caller_of(reroll.compile(Counting(), time_dim=0))
    assert plain.step_seconds(caller, (torch.randn(1_000, 2, 3),), {}) == (None, None)


def test_what_needs_no_gradient_is_not_timed() -> None:
    model, x = Counting().requires_grad_(False), torch.randn(100, 2, 3)
    caller = caller_of(reroll.compile(model, time_dim=0))
    assert plain.step_seconds(caller, (x,), {}) == (None, None)
    with torch.no_grad():
        caller = caller_of(reroll.compile(Counting(), time_dim=0))
        assert plain.step_seconds(caller, (x,), {}) == (None, None)


@pytest.mark.variants(4)
@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((1.0, 2.04), "Slower than plain PyTorch: a training step takes about 2.04 times its CPU time"),
        ((0.8, 1.0), "Slower than plain PyTorch: a training step takes about 1.25 times its CPU time"),
        ((1.0, 1.24), None),
        ((1e-9, None), None),
        ((None, None), None),
    ],
)
def test_explain_says_where_plain_pytorch_is_faster(
    seconds: tuple[float | None, float | None], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.GRU(3, 4), torch.randn(70, 2, 3)
    monkeypatch.setattr(explain, "step_seconds", lambda *_: plain.Seconds(*seconds))
    fast: Any = reroll.compile(model, time_dim=0, lowering="eager")
    notes = [note for note in reroll.explain(fast, x).notes if "than plain PyTorch" in note]
    assert len(notes) == (said is not None)
    assert all(note.startswith(f"{said},") for note in notes)


def test_the_compiled_model_is_timed_beside_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, runs = nn.GRU(3, 4), torch.randn(100, 2, 3), list[int]()
    caller = caller_of(reroll.compile(model, time_dim=0, lowering="eager"))

    class Counted:
        """The compiled model, which notes the lengths that it is called with."""

        def __init__(self) -> None:
            self.model, self.signature = caller.model, caller.signature
            self.time, self.options = caller.time, caller.options

        def __call__(self, value: Tensor) -> Any:
            runs.append(len(value))
            return caller(value)

    times = iter(count())

    def told(step: Callable[[], object]) -> float:
        """Of the plain one, whose turn is the first, the rounds; of the other its steps."""
        before = len(runs)
        step()
        return float(runs[-1] if len(runs) > before else next(times) % 4)

    monkeypatch.setattr(plain, "cpu_seconds_of", told)
    found = plain.step_seconds(Counted(), (x,), {})  # type: ignore[arg-type]
    assert runs == [12] * 4 + [50] * 4
    assert found.compiled is not None
    assert (found.plain, round(found.compiled, 6)) == (1.0, 100.0)  # the round before the first is not counted
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("prints", [False, True])
def test_a_backward_that_waits_is_not_disturbed_and_nothing_is_said_twice(
    prints: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "cpu_seconds_of", lambda step: (step(), 1.0)[1])

    class Telling(nn.Module):
        """Prints, and updates running statistics."""

        def __init__(self) -> None:
            super().__init__()
            self.cell, self.norm = nn.GRUCell(3, 4), nn.BatchNorm1d(4)

        def forward(self, x_TBI: Tensor) -> Tensor:
            if prints:
                print("called")  # is refused when it is compiled
            h_BN = x_TBI.new_zeros(x_TBI.shape[1], 4)
            for t in range(x_TBI.shape[0]):
                h_BN = self.norm(self.cell(x_TBI[t], h_BN))
            return h_BN

    model, x = Telling(), torch.randn(80, 3, 3)
    caller = caller_of(reroll.compile(model, time_dim=0, lowering="eager"))
    y = model(x).sum()
    capsys.readouterr()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = [plain.step_seconds(caller, (x,), {}) for _ in range(2)]
    assert found[0].plain is not None
    assert (found[0].compiled is None) == prints
    assert found[0] == found[1]
    assert not capsys.readouterr().out
    y.backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("width", "said"), [(64, True), (1, False)])
def test_explain_names_the_outputs_where_they_are_much_of_the_peak(width: int, said: bool) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.readout = nn.GRU(3, 8), nn.Linear(8, width)

        def forward(self, x_TBI: Tensor) -> Tensor:
            return self.readout(self.rnn(x_TBI)[0])  # type: ignore[no-any-return]

    fast: Any = reroll.compile(Wide(), time_dim=0, lowering="eager", schedule="standard")
    notes = reroll.explain(fast, torch.randn(400, 4, 3)).notes
    assert any("reroll.compile(model, loss=...)" in note for note in notes) == said
