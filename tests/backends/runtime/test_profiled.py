"""torch.profiler shows the instructions of a program and the segments inside them: a few rows, and arguments that say
which instruction and which steps it was, as the report does."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.program.spelled import RUN_KINDS, spelled_out
from reroll.report.report import Loop
from reroll.schedules.machine import pieces

EAGER: dict[str, Any] = {"lowering": "eager", "segment": 4, "on_no_recurrence": "error"}


class Leaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI, hs = torch.zeros_like(x_TBI[0]), []
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(self.cell(h_BI) + x_TBI[t])
            hs.append(h_BI)
        return torch.stack(hs)


def profiled(step: Any) -> Counter[str]:
    """How often each of reroll's ranges is seen while a step runs, with its arguments."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
    rows = [each for each in seen.key_averages() if each.key.startswith("reroll: ")]
    ranges = Counter(f"{each.name} {each.kwinputs}" for each in seen.events() or () if each.name.startswith("reroll: "))
    assert len(rows) <= 12
    assert sum(each.count for each in rows) == ranges.total()
    return ranges


def expected(loop: Loop) -> Counter[str]:
    """What a program says, and the segments that its runs and backwards are made of."""
    found: Counter[str] = Counter()
    title, frontier, compiled = f"reroll: {loop.recurrence.name}", 0, loop.program.segment
    rest = loop.program.steps % compiled
    for each in spelled_out(loop.program):
        if each.kind in ("carry", "output"):
            continue
        found[f"{title} {each.kind} {{'instruction': {each.name!r}}}"] += 1
        first, at = each.kind in RUN_KINDS and each.start >= frontier, each.start
        frontier = max(frontier, each.stop if each.kind in RUN_KINDS else 0)
        word = "forward" if first else "replay" if each.kind in RUN_KINDS else "backward"
        parts = [
            length
            for length, count in pieces(each.stop - each.start, {compiled, rest or compiled})
            for _ in range(count)
        ]
        for length in parts:
            found[f"{title} segment {word} {{'start': {at}, 'stop': {at + length}}}"] += 1
            at += length
    return found


SCHEDULES = [
    {"schedule": "store_all"},
    {"schedule": "double", "remote": "disk", "chunk": 12, "slots": 2},
    {"schedule": "hierarchical", "remote": "disk", "chunk": 12, "slots": 2},
    {"schedule": "revolve", "slots": 2},
]


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda options: str(options["schedule"]))
def test_every_instruction_and_segment_is_seen_as_often_as_it_is_played(options: dict[str, Any]) -> None:
    model, x_TBI = Leaky(), torch.randn(38, 2, 3)
    run = torch.compile(model, backend="reroll", options=EAGER | options, fullgraph=True)
    (loop,) = reroll.explain(run, x_TBI).loops
    seen = profiled(lambda: run(x_TBI).sum().backward())
    assert seen == expected(loop)
    parts = {f"{{'instruction': {each.name!r}}}" for each in loop.trace().events}
    assert parts <= {"{" + name.partition("{")[2] for name in seen}


def test_a_first_call_under_a_profiler_captures_no_names() -> None:
    model, x_TBI = Leaky(), torch.randn(9, 2, 3)
    run = reroll.compile(model, schedule="standard", **{**EAGER, "on_no_recurrence": "error"})
    seen = profiled(lambda: run(x_TBI).sum().backward())
    grads = [parameter.grad for parameter in model.parameters()]
    (loop,) = (report := reroll.explain(run, x_TBI)).loops
    assert seen == expected(loop)
    nodes = [*report.outer.nodes, *loop.recurrence.step.graph.nodes]
    assert not [node for node in nodes if "profiler" in str(node.target) or "record_function" in str(node.target)]
    for one, other in zip(grads, torch.autograd.grad(model(x_TBI).sum(), list(model.parameters())), strict=True):
        torch.testing.assert_close(one, other)


def test_without_a_profiler_no_name_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch._C._profiler._RecordFunctionFast

    def refuse(name: str, *args: Any) -> Any:  # torch has ranges of its own
        if name.startswith("reroll"):
            raise AssertionError(f"{name} was made")
        return made(name, *args)

    monkeypatch.setattr(torch._C._profiler, "_RecordFunctionFast", refuse)
    run = torch.compile(Leaky(), backend="reroll", options=EAGER | {"schedule": "standard"})
    run(torch.randn(20, 2, 3)).sum().backward()
    with pytest.raises(AssertionError, match=r"reroll: .* was made"), torch.profiler.profile():
        run(torch.randn(20, 2, 3))
