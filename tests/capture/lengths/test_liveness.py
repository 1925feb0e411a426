"""Which events of a run anything can depend on, and numbers that change in unknown ways where nothing does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reroll.capture.lengths.liveness import live_events
from reroll.capture.recorder.events import Recorder


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
