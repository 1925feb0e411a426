"""What is wrong with the input is said in a sentence, or the result is right."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from agreement import QUICK, compare, results, sizes
from networks_zoo import SIZE, Net, load
from reroll.backends.construct import build as budgets
from reroll.errors import BudgetError, NoRecurrenceError, OptionError, RerollWarning
from walks import Shared

pytestmark = pytest.mark.usefixtures("shared_walks")
ZOO = load()


def compiled(run: Callable[..., Any], fullgraph: bool = True, **options: Any) -> Callable[..., Any]:
    return Shared(run, {**QUICK, **options}, fullgraph=fullgraph)


def inputs(steps: int = 9, batch: int = 2) -> Tensor:
    return torch.randn(steps, batch, SIZE)


@pytest.mark.variants(4)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shedule": "double"}, "Unknown option 'shedule'. Did you mean 'schedule'"),
        ({"options": {"segment": 8}}, "Unknown option 'options'. Pass options as keywords"),
        ({"replay": "yes"}, "Option replay='yes' is not valid"),
        ({"schedule": "standard", "remote": "disk"}, "Contradictory options: remote='disk' has no effect"),
        (
            {"memory_budget": "lots"},
            "memory_budget='lots' is not a size.*may also be a fraction such as 0.1, or 'auto'",
        ),
    ],
)
def test_the_user_sees_the_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        torch.compile(Net(ZOO["lif"]), backend="reroll", fullgraph=True, options={**QUICK, **options})(inputs())


@pytest.mark.parametrize("spikes", [torch.rand(20, 2, SIZE) > 0.5, torch.randint(0, 2, (20, 2, SIZE))])
def test_an_error_of_the_model_s_own_is_raised_as_such(spikes: Tensor) -> None:
    model = nn.RNNCell(SIZE, 3)

    def loop(x_TBI: Tensor) -> Tensor:
        h_BH = torch.zeros(x_TBI.shape[1], 3)
        for x_BI in x_TBI:
            h_BH = model(x_BI, h_BH)
        return h_BH

    with pytest.raises(RuntimeError) as expected:
        loop(spikes)
    with pytest.raises(RuntimeError) as found:
        reroll.compile(loop, lowering="eager")(spikes)
    assert str(found.value) == str(expected.value)


def test_explain_needs_inputs() -> None:
    with pytest.raises(OptionError, match="explain was given no inputs of Net"):
        reroll.explain(reroll.compile(Net(ZOO["lif"])))


@pytest.mark.parametrize(
    ("schedule", "passes", "sentence"),
    [
        ("standard", ("recompute",), r"run 0 of 32 steps again instead of \d+.* Left out are: .*save"),
        ("remote", ("save", "recompute"), r"play remote .* move 0 carries off instead of \d+"),
        ("standard", tuple(reversed(reroll.DEFAULT_PASSES)), "Their order is another one than reroll's"),
    ],
)
def test_passes_that_do_not_play_the_schedule_are_told(schedule: str, passes: tuple[str, ...], sentence: str) -> None:
    model = Net(ZOO["lif"])
    with pytest.warns(RerollWarning, match=sentence):
        compiled(model, schedule=schedule, passes=passes, codec="none")(inputs(33))


def test_passes_that_play_the_schedule_are_not_mentioned() -> None:
    model, all_but_products = Net(ZOO["lif"]), tuple(n for n in reroll.DEFAULT_PASSES if n != "batch-products")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        given: Any
        for given in ({"passes": all_but_products}, {"passes": ("recompute",), "schedule": "store_all"}):
            compiled(model, **{"schedule": "standard", **given})(inputs(33))


def test_a_budget_below_the_least_says_the_least() -> None:
    model = Net(ZOO["lif"])
    with pytest.raises(
        OptionError, match=r"below the least .*: [\d,]+ bytes .* with schedule \w+ .*Raise the budget[^T]*$"
    ):
        compiled(model, memory_budget=10)(inputs(33))
    with pytest.raises(OptionError, match="double"):
        compiled(model, memory_budget=10, schedule="double", remote="disk")(inputs(33))


@pytest.mark.parametrize("steps", [12, 60])
def test_a_part_that_is_too_small_names_one_that_will_do(steps: int) -> None:
    """With few steps the part has to be greater than with many."""
    model = Net(ZOO["lif"])
    with pytest.raises(OptionError, match="with more steps a smaller part will do") as refused:
        compiled(model, memory_budget=0.05, segment=1)(inputs(steps))
    (part,) = map(float, re.findall(r"Raise the budget to (\S+) or more", str(refused.value)))
    torch.compiler.reset()
    compiled(model, memory_budget=part, segment=1)(inputs(steps))
    torch.compiler.reset()
    with pytest.raises(OptionError, match="Raise the budget"):
        compiled(model, memory_budget=part - 0.02, segment=1)(inputs(steps))


def test_a_part_of_nothing_and_a_part_that_never_does_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(ZOO["lif"])
    with pytest.raises(OptionError, match=r"\(0 bytes\) is below the least"):
        compiled(model, memory_budget=1e-9, segment=1)(inputs(33))
    torch.compiler.reset()
    schedule: dict[str, Any] = {"schedule": "remote", "remote": "disk", "segment": 1, "chunk": 4}
    monkeypatch.setattr("reroll.backends.dynamo.plain.plain_peak", lambda *_: 100)
    with pytest.raises(OptionError, match="no part of plain's is enough"):
        compiled(Summed(), memory_budget=1.0, **schedule)(inputs(4))


class Summed(nn.Module):
    """Its tape is all that it holds, and small."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = torch.zeros_like(x_TBI[0])
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(self.layer(h_BI) + x_TBI[t])
        return h_BI


def any_length(run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = reroll.compile(run, **{**QUICK, **options})
    return made


@pytest.mark.parametrize("compiled_by", [compiled, any_length])
def test_a_budget_above_what_the_machine_has_is_told(
    compiled_by: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "total_bytes", lambda device: 1_000_000)
    monkeypatch.setattr(budgets, "free_bytes", lambda device: 400_000)
    model, x = Net(ZOO["lif"]), inputs(33)
    above, tight = compiled_by(model, memory_budget="1GiB"), compiled_by(model, memory_budget=500_000)
    with pytest.warns(RerollWarning, match=r"'1GiB' \(1 GiB\) is more than the 977 KiB of memory that this machine"):
        (loop,) = reroll.explain(above, x).loops
    assert loop.budget is not None
    assert loop.budget <= 1_000_000
    with pytest.warns(RerollWarning, match="is more than the 391 KiB of memory that are free now"):
        reroll.explain(tight, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        reroll.explain(compiled_by(model, memory_budget=400_000), x)
        reroll.explain(compiled_by(model, memory_budget=1.0), x)


def test_shorter_segments_are_tried_before_a_budget_is_refused() -> None:
    model = Net(ZOO["lif"])
    with pytest.raises(BudgetError) as refused:
        compiled(model, memory_budget=10, segment=4)(inputs(33))
    least = refused.value.nbytes
    with pytest.raises(BudgetError):
        compiled(model, memory_budget=least - 1, segment=4)(inputs(33))
    compiled(model, memory_budget=least - 1)(inputs(33))  # fits with segments of fewer than four steps


@pytest.mark.variants(4)
@pytest.mark.parametrize("steps", [4, 5, 9])
@pytest.mark.parametrize("segment", [1, 8, 100])
def test_shorter_than_a_segment(steps: int, segment: int) -> None:
    different, made = compare(Net(ZOO["plain_rnn"]).double(), (inputs(steps).double(),), segment=segment)
    assert not different
    assert sizes(made) == ((steps, 1),)


def test_an_empty_batch() -> None:
    different, made = compare(Net(ZOO["lif"]).double(), (inputs(9, 0).double(),))
    assert not different
    assert sizes(made)


class Still(nn.Module):
    """No parameters; the state has another kind of number."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1:], dtype=self.dtype)
        for t in range(x.shape[0]):
            h = h * 2 + (x[t] > 0.5).to(self.dtype)
        return h


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64, torch.uint8])
def test_kinds_of_carries(dtype: torch.dtype) -> None:
    different, made = compare(Still(dtype), (inputs().double(),), schedule="double", chunk=4, slots=2)
    assert not different
    assert sizes(made) == ((9, 1),)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + h)


class Breaking(nn.Module):
    """Dynamo cannot know which way the condition goes, and compiles the cell alone."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            if h.sum() > 1000:
                h = h * 0
        return h


def test_control_flow_that_dynamo_breaks_on_is_named() -> None:
    x, model = inputs(), Breaking()
    with pytest.raises(Exception, match=r"h\.sum\(\) > 1000"):
        compiled(model)(x)
    torch.compiler.reset()
    with pytest.warns(RerollWarning, match="may have broken the graph in it, which TORCH_LOGS=graph_breaks shows"):
        assert torch.equal(compiled(model, fullgraph=False)(x), model(x))


def without_loop(x: Tensor) -> Tensor:
    return torch.tanh(x @ x.mT).sum()


def unsteady(x: Tensor) -> Tensor:
    h = x[0]
    for t in (1, 2, 4, 7, 8, 3, 0):
        h = torch.tanh(h + x[t])
    return h


def test_no_recurrence_warns_once_and_says_why() -> None:
    run = compiled(without_loop)
    x = inputs()
    with pytest.warns(RerollWarning, match=r"looked for a step that repeats at least 3 times .*no sequence") as seen:
        assert torch.equal(run(x), without_loop(x))
    assert len([each for each in seen if issubclass(each.category, RerollWarning)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x)


def test_an_index_that_does_not_move_evenly_is_rolled() -> None:
    run, x = compiled(unsteady), inputs()
    assert torch.equal(run(x), unsteady(x))
    assert reroll.explain(run, x).loops


def test_no_recurrence_as_an_error() -> None:
    with pytest.raises(NoRecurrenceError, match=r"reroll found no recurrence: looked for .*on_no_recurrence='warn'"):
        compiled(without_loop, on_no_recurrence="error")(inputs())


def test_a_leaf_that_is_changed_in_place_is_refused_as_eager_does() -> None:
    model = Net(ZOO["mutates_input"])
    for run in (model, compiled(model)):
        with pytest.raises(RuntimeError, match=r"leaf Variable|a leaf"):
            results(run, model, (inputs(),))


def test_an_update_that_reroll_cannot_follow_leaves_the_graph_alone() -> None:
    def network(x: Tensor, y: Tensor) -> Tensor:
        h = x[0]
        for t in range(x.shape[0]):
            h = torch.tanh(h + x[t])
        y.mul_(2)
        return h + y[0]

    x = inputs()
    expected = network(x.clone(), (w := x.clone())[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        z = x.clone()
        assert torch.equal(compiled(network)(x.clone(), z[1:]), expected)
    assert torch.equal(z, w)


def test_a_warning_names_the_line_of_the_user_once() -> None:
    model, x = torch.compile(nn.Linear(3, 3), backend="reroll", options={"lowering": "eager"}), torch.randn(2, 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for rows in (2, 3):
            model(x.new_ones(rows, 3))
    assert [Path(each.filename) for each in seen if each.category is RerollWarning] == [Path(__file__)]
