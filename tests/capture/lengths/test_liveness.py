"""Which events of a run anything can depend on, and numbers that change in unknown ways where nothing does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.capture.lengths.liveness import live_events
from reroll.capture.recorder.events import Recorder

EAGER: dict[str, Any] = {"lowering": "eager"}


def live_of(run: Any) -> list[str]:
    """The names of the live events of a run, whose result is given."""
    events: list[tuple[Any, Any]] = []
    recorder = Recorder(lambda *event: events.append(event), {})
    with recorder:
        value = run()
    if value is not None:
        recorder.give("result", value)
    colours = [colour for colour, _ in events]
    names = dict(enumerate(colours))
    live = live_events(list(names), [numbers for _, numbers in events], names)
    return [getattr(colours[at][0], "__name__", colours[at][0]) for at in sorted(live)]


def test_what_is_not_read_is_dead() -> None:
    def run() -> Tensor:
        x = torch.ones(3)
        (x.exp() * 2).sin()
        return x.cos()

    assert live_of(run) == ["ones", "cos", "gives result"]


def test_updates_answers_draws_and_functions_of_python_are_live() -> None:
    def run() -> None:
        x = torch.ones(3)
        x.mul_(2)
        x[0] = 1
        bool(x.sum() > 0)
        torch.rand(3).sin()
        nn.functional.relu(x.cos())
        torch.add(x, x.exp(), out=torch.empty(3))
        torch.batch_norm(x[None], None, None, x, x, True, 0.1, 1e-5, False)

    expected = ["ones", "mul_", "__setitem__", "sum", "gt", "__bool__", "rand", "cos", "relu", "exp", "empty", "add"]
    assert live_of(run) == [*expected, "__getitem__", "batch_norm"]


@pytest.mark.parametrize("count", [3, 12])
def test_all_items_of_a_list_are_read(count: int) -> None:
    def run() -> Tensor:
        rows = [torch.ones(3).mul(n) for n in range(count)]
        pairs = [torch.stack([row, row.exp()]) for row in rows]
        rows[0].sin()
        return torch.stack(pairs)

    assert live_of(run) == [*["ones", "mul"] * count, *["exp", "stack"] * count, "stack", "gives result"]


class Decaying(nn.Module):
    """Numbers of the step in what nothing reads, or in what is read as ``read`` says."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.fc, self.read = nn.Linear(4, 4, dtype=torch.float64), read

    def forward(self, x: Tensor) -> Any:
        h = unread = torch.zeros(3, 4, dtype=torch.float64)
        for t in range(x.shape[0]):
            h = torch.tanh(self.fc(x[t]) + h)
            unread = unread * 0.9**t + h
            if self.read == "asked":
                assert (h * 0.8**t < 9).all()
        if self.read == "list":
            return [h, unread.detach().sum().floor() * 0.0]
        return h


def test_numbers_that_nothing_reads_may_be_any() -> None:
    torch.manual_seed(0)
    run = reroll.compile(Decaying("never"), time_dim=0, **EAGER)
    for steps in (20, 31):
        x = torch.randn(steps, 3, 4, dtype=torch.float64, requires_grad=True)
        reroll.check(run, x, strict=True, measure=False)
    assert len(reroll.explain(run, x).loops) == 1


@pytest.mark.parametrize("read", ["list", "asked"])
@pytest.mark.filterwarnings("ignore:Dynamo cannot read")
def test_numbers_that_are_read_are_right(read: str) -> None:
    torch.manual_seed(0)
    run = reroll.compile(Decaying(read), time_dim=0, **EAGER)
    x = torch.randn(20, 3, 4, dtype=torch.float64, requires_grad=True)
    reroll.check(run, x, strict=True, measure=False)
