"""What ``reroll.compile`` takes and gives: modules, functions and methods; what it refuses; explain and budgets."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import reroll
import reroll.backends.dynamo.entry as dynamo
from deep_networks import WIDTH, Stack, layers
from length_networks import DOUBLE, EAGER, H, I, Net, agree, counted, growing_attribute, kept_input, last, rows, stacked
from reroll.backends.front.recorded import Recorded
from reroll.errors import NoRecurrenceError, OptionError, RerollWarning, UnsupportedError

pytestmark = pytest.mark.usefixtures("double_precision")


def test_a_module_stays_a_module() -> None:
    net = Net(last)
    fast = reroll.compile(net, **EAGER)
    x_TBI, seen = torch.randn(20, 2, I), []
    assert isinstance(fast, nn.Module)
    assert [id(p) for p in fast.parameters()] == [id(p) for p in net.parameters()]
    assert fast.cell is net.cell
    fast.scale = 2.0  # type: ignore[assignment]
    assert net.scale == 2.0
    fast.register_forward_hook(lambda *args: seen.append(args[-1].shape))
    torch.testing.assert_close(fast(x_TBI), net(x_TBI))
    assert seen == [(2, H)]
    fast.load_state_dict({name: value * 0 for name, value in fast.state_dict().items()})
    assert not any(parameter.any() for parameter in net.parameters())
    assert fast.eval().training is net.training is False


def test_copies_and_pickles_have_parameters_of_their_own() -> None:
    net = Net(last)
    fast = reroll.compile(net, **EAGER)
    x_TBI = torch.randn(20, 2, I)
    expected = fast(x_TBI)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(twin(x_TBI), expected)
        with torch.no_grad():
            twin.cell.weight_ih.zero_()
        assert not torch.equal(twin(x_TBI), expected)
        assert torch.equal(fast(x_TBI), expected)


def test_lightning_leaves_nothing_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torch.compile keeps what a module is compiled with on the module, which is pickled with it."""
    wrappers = pytest.importorskip("lightning.fabric.wrappers")
    monkeypatch.setattr(torch, "compile", wrappers._capture_compile_kwargs(torch.compile))
    fast = reroll.compile(Net(last), **EAGER)
    x_TBI = torch.randn(20, 2, I)
    assert torch.equal(fast(x_TBI), pickle.loads(pickle.dumps(fast))(x_TBI))


def normed(net: Any, x_TBI: Tensor) -> Tensor:
    """The buffer's first value comes from outside: the loop begins behind it, and ends with half a step."""
    h_BI = x_TBI.new_zeros(x_TBI.shape[1:])
    for t in range(x_TBI.shape[0]):
        n_BI = net.norm(x_TBI[t]) * 0.3
        h_BI = 0.9 * h_BI + 0.5 * n_BI
    return h_BI


def warmed_up(net: Net, x_TBI: Tensor) -> Tensor:
    """The first steps end as all do."""
    h_BI = x_TBI.new_zeros(x_TBI.shape[1:])
    for t in range(x_TBI.shape[0]):
        n_BI = torch.tanh(x_TBI[t])
        if t < 4:
            n_BI = n_BI * 0.5 + 0.1
        h_BI = 0.9 * h_BI + 0.5 * n_BI
    return h_BI


def every_second(net: Net, x_TBI: Tensor) -> Tensor:
    """The rows of steps of two kinds, read by a loop of one."""
    h_BI, rows = x_TBI.new_zeros(x_TBI.shape[1:]), list[Tensor]()
    for t in range(x_TBI.shape[0]):
        n_BI = rows[-1] if t % 2 and rows else x_TBI[t]
        h_BI = torch.tanh(0.9 * h_BI + 0.5 * n_BI)
        rows.append(h_BI)
    return torch.stack([row_BI.sin() for row_BI in rows])


@pytest.mark.parametrize("body", [normed, warmed_up, every_second])
def test_loops_that_begin_or_end_in_the_middle_of_a_step(body: Callable[..., Any]) -> None:
    net: Any = Net(body)
    net.norm = nn.BatchNorm1d(I)
    assert reroll.check(reroll.compile(net, **EAGER), torch.randn(20, 3, I), measure=False).equal


def test_decorators_of_functions_and_methods() -> None:
    @reroll.compile(**EAGER)  # type: ignore[untyped-decorator]
    def total(x_TB: Tensor) -> Tensor:
        """A leaky sum."""
        v_B = x_TB.new_zeros(x_TB.shape[1])
        for t in range(x_TB.shape[0]):
            v_B = torch.tanh(0.9 * v_B + x_TB[t])
        return v_B

    class Method(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        @reroll.compile(**EAGER)  # type: ignore[untyped-decorator]
        def forward(self, x_TB: Tensor) -> Tensor:
            v_B = x_TB.new_zeros(x_TB.shape[1])
            for t in range(x_TB.shape[0]):
                v_B = torch.tanh(0.9 * v_B + self.gain * x_TB[t])
            return v_B

    x_TB = torch.randn(40, 3)
    assert total.__name__ == "total"
    assert total.__doc__ == "A leaky sum."
    assert torch.allclose(Method()(x_TB), total(x_TB), atol=1e-14)


def test_a_number_that_counts_steps_is_counted_once_a_call() -> None:
    net = Net(counted)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    for steps in (30, 9, 30):
        agree(net, run, twin, torch.randn(steps, 2, I))
        assert twin.scale == net.scale > steps


def test_attributes_that_depend_on_the_length_are_left_as_the_model_does() -> None:
    for body, name in ((growing_attribute, "history"), (kept_input, "last")):
        net = Net(body)
        twin = copy.deepcopy(net)
        run = reroll.compile(twin, **EAGER)
        for steps in (30, 9):
            x_TBI = torch.randn(steps, 2, I)
            torch.testing.assert_close(run(x_TBI), net(x_TBI))
            torch.testing.assert_close(getattr(run, name), getattr(net, name))
        assert not run.reroll_caller.is_read


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_decisions_on_values_are_right_whatever_they_are() -> None:
    def branch(net: Net, x_TBI: Tensor) -> Any:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
        for t in range(x_TBI.shape[0]):
            h_BH = net.cell(x_TBI[t], h_BH)
            if h_BH.sum() > 1:
                h_BH = h_BH * 0.5
        return h_BH

    net = Net(branch)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    for steps in (30, 30, 9):
        agree(net, run, twin, torch.randn(steps, 2, I))


@pytest.mark.parametrize(("at", "shape"), [(0, (300, 2, I)), (1, (20, 150, I))])
def test_a_loop_over_any_dimension_is_rolled(at: int, shape: tuple[int, ...]) -> None:
    def by_dimension(net: Net, x_TBI: Tensor) -> Any:
        h_BH, found = x_TBI.new_zeros(x_TBI.shape[1 - at], H), []
        for each in x_TBI.unbind(at):
            h_BH = net.cell(each, h_BH)
            found.append(h_BH.mean())
        return torch.stack(found)

    net = Net(by_dimension)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    for part in (slice(None), slice(0, 12)):
        agree(net, run, twin, torch.randn(shape)[part, part])
    assert sum(loop.recurrence.steps for loop in reroll.explain(run, torch.randn(shape)).loops) >= shape[at]


def test_a_layer_over_time_may_stand_before_a_loop_over_another_dimension() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.w = nn.GRU(I, 4), nn.Linear(4, 4)

        def forward(self, x_TBI: Tensor) -> Tensor:
            last_BH, found = self.gru(x_TBI)[1][0], []
            for b in range(x_TBI.shape[1]):
                h_H = last_BH[b]
                for _ in range(20):
                    h_H = torch.tanh(self.w(h_H))
                found.append(h_H)
            return torch.stack(found)

    model, x = Heads(), torch.randn(30, 16, I)
    torch.testing.assert_close(reroll.compile(model, **EAGER)(x), model(x))


class Rows(nn.Module):
    """States of their own for each row of the batch, the first those of a layer over time."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.w = nn.GRU(I, I), nn.Parameter(torch.randn(I, I) / 3)

    def forward(self, x_TBI: Tensor) -> Tensor:
        rows, found = list(self.gru(x_TBI)[1][0]), []
        for t in range(x_TBI.shape[0]):
            rows = [torch.tanh(row_I @ self.w + x_TBI[t, b]) for b, row_I in enumerate(rows)]
            found.append(sum(rows))
        return torch.stack(found)


@pytest.mark.parametrize("batch", [3, 9])  # nine rows are themselves a loop
def test_rows_of_what_a_layer_over_time_gave_may_be_carries(batch: int) -> None:
    model = Rows()
    reroll.check(reroll.compile(model, **EAGER), torch.randn(20, batch, I), strict=True, measure=False)


@pytest.mark.filterwarnings("ignore:Every step of the loop")
def test_a_loop_over_another_dimension_may_read_all_of_time() -> None:
    class Columns(Rows):
        def forward(self, x_TBI: Tensor) -> Tensor:
            all_TBI, last_1BI = self.gru(x_TBI)
            h_I = x_TBI.new_zeros(I)
            for b in range(x_TBI.shape[1]):
                h_I = torch.tanh(last_1BI[0, b] + h_I @ self.w + all_TBI[:, b].sum(0))
            return h_I

    run = reroll.compile(Columns(), **EAGER)
    for steps in (20, 31):
        reroll.check(run, torch.randn(steps, 3, I), strict=True, measure=False)


def test_a_function_of_as_many_operands_as_there_are_steps() -> None:
    def joined(net: Net, x_TBI: Tensor) -> Any:
        h_BH, found = x_TBI.new_zeros(x_TBI.shape[1], H), []
        for x_BI in x_TBI.unbind():
            h_BH = net.cell(x_BI, h_BH)
            found.append(h_BH)
        return torch.block_diag(*found)

    x_TBI = torch.randn(20, 2, I, requires_grad=True)
    reroll.check(reroll.compile(Net(joined), **EAGER), x_TBI, strict=True, measure=False)


class Table(nn.Module):
    """Adds a row of a table at each step."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.weight = nn.Parameter(torch.randn(rows, 4)), nn.Parameter(torch.randn(4, 4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1:])
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h @ self.weight + self.rows[t])
        return h


@pytest.mark.parametrize("steps", [8, 9, 10, 11])
def test_a_table_may_have_a_row_for_each_step_and_no_more(steps: int) -> None:
    net = Table(steps).double()
    reroll.check(reroll.compile(net, lowering="eager"), torch.randn(steps, 3, 4).double(), strict=True, measure=False)


def test_a_table_that_is_too_short_for_short_runs() -> None:
    class Skips(Table):
        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[1:])
            for t in range(0, x.shape[0], 2):
                h = torch.tanh(x[t] + h @ self.weight + self.rows[t])
            return h

    compiled, x = reroll.compile(Skips(8), lowering="eager"), torch.randn(8, 3, 4, requires_grad=True)
    reroll.check(compiled, x, strict=True, measure=False)
    assert reroll.explain(compiled, x).loops


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(OptionError, match="cannot be called"):
        reroll.compile(3)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="Did you mean 'schedule'"):
        reroll.compile(Net(last), shedule="double")  # type: ignore[call-overload]


def test_explain_shows_the_plan_of_the_length() -> None:
    run = reroll.compile(Net(stacked), **DOUBLE)
    for steps in (400, 30):
        assert reroll.explain(run, torch.randn(steps, 2, I)).loops[0].recurrence.steps in (steps, steps - 1)


def test_a_budget_is_met_at_every_length() -> None:
    net = Net(last)
    run = reroll.compile(net, **EAGER, memory_budget="64KiB", remote="disk")
    for steps in (60, 500):
        x_TBI = torch.randn(steps, 2, I)
        report = reroll.explain(run, x_TBI)
        assert report.loops[0].prediction.peak <= 64 * 2**10
        assert torch.allclose(run(x_TBI), net(x_TBI), atol=1e-12)


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", reroll.RerollWarning)
        found = reroll.compile(Net(rows), **EAGER)(torch.randn(30, 2, I))
    assert all(isinstance(leaf, Tensor | int) for leaf in tree_leaves(found))


def test_the_backend_says_once_what_a_long_loop_costs() -> None:
    def leaky(x_TB: Tensor) -> Tensor:
        v_B = x_TB[0]
        for t in range(x_TB.shape[0]):
            v_B = torch.tanh(v_B + x_TB[t])
        return v_B

    dynamo._say_how_to_unroll_less.cache_clear()
    for steps, said in ((9, 0), (30, 1), (20, 0)):
        with mock.patch.object(dynamo, "_LONG", 16), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.compile(leaky, backend="reroll", options=EAGER, dynamic=False)(torch.randn(steps, 2))
        assert sum("reroll.compile(model) records" in str(each.message) for each in caught) == said


def test_many_blocks_are_no_long_loop_over_time() -> None:
    dynamo._say_how_to_unroll_less.cache_clear()
    with mock.patch.object(dynamo, "_LONG", 6), warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        model = torch.compile(Stack(*layers(8)), backend="reroll", options=EAGER)
        model(torch.randn(4, WIDTH))
    assert len(reroll.explain(model, torch.randn(4, WIDTH)).loops) == 1


def test_two_compilations_of_one_model_keep_to_their_options() -> None:
    net, x_TBI = Net(last), torch.randn(40, 2, I)
    runs = {name: reroll.compile(net, **EAGER, schedule=name) for name in ("standard", "store_all")}
    for name, run in runs.items():
        torch.testing.assert_close(run(x_TBI), net(x_TBI))
        assert reroll.explain(run, x_TBI).loops[0].choice.schedule == name


def test_batches_that_are_views_of_one_data_set_are_recorded_once() -> None:
    net, data = Net(last), torch.randn(30, 8, I)
    run = reroll.compile(net, **EAGER)
    for at in range(0, 8, 2):
        batch = data[:, at : at + 2]
        assert torch.allclose(run(batch), net(batch), atol=1e-12)
    assert len(run.reroll_caller.at_length.recorded.recordings) == 1


@pytest.mark.parametrize(
    ("windows", "seen"),
    [
        (lambda d: (d[:13], d[1:]), True),
        (lambda d: tuple(map(torch.from_numpy, (d.numpy()[:13], d.numpy()[1:]))), False),
    ],
)
def test_a_change_of_memory_that_a_sequence_shares_is_right_or_refused(windows: Callable[..., Any], seen: bool) -> None:
    def body(net: Net, x_TBI: Tensor, y_TBI: Tensor) -> Any:
        y_TBI.mul_(0.5)
        return last(net, x_TBI)

    net, data = Net(body), torch.randn(14, 2, I)
    run, values, theirs = reroll.compile(net, **EAGER), data.clone(), data.clone()
    with torch.no_grad():
        apart = data[:13].clone(), data[1:].clone()
        torch.testing.assert_close(run(*map(torch.clone, apart)), net(*apart))
        if seen:
            torch.testing.assert_close(run(*windows(data)), net(*windows(theirs)))
            torch.testing.assert_close(data, theirs)
            return
        with pytest.raises(UnsupportedError, match="shares memory"):
            run(*windows(data))
    assert torch.equal(data, values)


def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    for _ in range(2):
        run = reroll.compile(Net(stacked), **EAGER)
        run(torch.randn(20, 2, I))
        made = weakref.ref(next(iter(run.reroll_caller.at_length.recorded.recordings.values())).run)
        del run
        gc.collect()
        assert made() is None


def updated_behind_detach(net: Net, x_TBI: Tensor) -> Tensor:
    """What detach() gave takes a gradient in place, and is the memory of what a backward reads."""
    h_BI = torch.zeros_like(x_TBI[0])
    for x_BI in x_TBI:
        z_BI = h_BI.detach()
        z_BI += 0.1 * x_BI.sigmoid() * x_BI
        h_BI = torch.tanh(h_BI + z_BI)
    return h_BI


def layout_that_turns(net: Net, x_TBI: Tensor) -> Tensor:
    """A carry that is transposed at every step, of which numbers are dropped."""
    h_II = torch.eye(I, dtype=x_TBI.dtype)
    for x_BI in x_TBI:
        h_II = torch.tanh(h_II.t() + nn.functional.dropout(h_II) * x_BI.mean())
    return h_II


def test_what_torch_refuses_is_its_error() -> None:
    net, x_TBI = Net(updated_behind_detach), torch.randn(20, 2, I, requires_grad=True)
    for called in (reroll.compile(net, **EAGER), net):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            called(x_TBI).sum().backward()


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_what_no_loop_takes_is_right_as_it_is() -> None:
    net = Net(layout_that_turns)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, **EAGER)
    for steps in (20, 9, 20):
        agree(net, run, twin, torch.randn(steps, 2, I))


def two_apart(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Every second step, each reading what was two before it, of which the third and the last but one are used."""
    scaled, largest = list[Tensor](), list[Tensor]()
    for t in range(0, x.shape[0], 2):
        before = largest[-2] if len(largest) > 1 else x[t]
        largest.append(torch.maximum(before, before))
        scaled.append(before * 1.5)
    return scaled[2] * scaled[-2], largest


def test_rows_that_a_short_sequence_does_not_have_are_no_error() -> None:
    model = reroll.compile(two_apart, lowering="eager")
    for steps in (9, 5, 6, 7, 8, 10, 11, 12, 13, 30):
        x = torch.randn(steps, 3, dtype=torch.float64, requires_grad=True)
        reroll.check(model, x, strict=True, measure=False)


def test_a_period_beyond_those_that_are_tried_is_guessed_from_where_a_run_departs() -> None:
    def rare(x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1])
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h)
            if t % 18 == 17:
                h = h * 0.5
        return h

    model = reroll.compile(rare, lowering="eager")
    for steps in (90, 108, 95):
        reroll.check(model, torch.randn(steps, 3, dtype=torch.float64, requires_grad=True), strict=True, measure=False)


def test_a_step_that_is_another_one_late_in_a_sequence() -> None:
    def once(x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1])
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h)
            if t == 40:
                h = h.detach()
        return h

    model = reroll.compile(once, lowering="eager")
    for steps in (90, 30, 41, 131):
        reroll.check(model, torch.randn(steps, 3, dtype=torch.float64, requires_grad=True), strict=True, measure=False)


def test_a_model_that_was_compiled_in_place_is_rolled_and_refused_by_name_where_dynamo_does_not_read_it() -> None:
    net, x_TBI = Net(last), torch.randn(20, 2, I)
    net.compile(backend="eager")
    fast = reroll.compile(net, **EAGER)
    torch.testing.assert_close(fast(x_TBI), net(x_TBI))
    assert len(reroll.explain(fast, x_TBI).loops) == 1
    with pytest.raises(UnsupportedError, match="in place"):
        reroll.explain(torch.compile(net, backend="reroll", options=EAGER), x_TBI)


def test_a_model_that_is_compiled_by_others_too_is_rolled() -> None:
    net, x_TBI = Net(last), torch.randn(20, 2, I)
    other = torch.compile(net, backend="eager")
    expected = other(x_TBI)
    for model in (net, other):
        fast = reroll.compile(model, **EAGER)
        torch.testing.assert_close(fast(x_TBI), expected)
        assert len(reroll.explain(fast, x_TBI).loops) == 1


@pytest.mark.usefixtures("unproved")
def test_a_call_like_the_one_before_is_recorded_once() -> None:
    def late(net: Net, x: Tensor) -> Any:
        h = x.new_zeros(x.shape[1], H)
        for t in range(x.shape[0]):
            h = net.cell(x[t], h)
            h = h * 0.5 if t >= 10 else h
        return h

    net = Net(late)
    fast = reroll.compile(net, **EAGER)
    for steps, records in ((200, 1), (200, 1), (50, 2), (200, 2)):
        x_TBI = torch.randn(steps, 2, I)
        torch.testing.assert_close(fast(x_TBI), net(x_TBI))
        assert len(fast.reroll_caller.at_length.recorded.recordings) == records


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_a_sequence_that_is_too_short_is_recorded_once() -> None:
    net = Net(stacked)
    compiled = reroll.compile(net, **EAGER)
    for _ in range(2):
        compiled(torch.randn(2, 5, I))
    with mock.patch.object(Recorded, "record", autospec=True, side_effect=Recorded.record) as looked:
        for _ in range(3):
            x_TBI = torch.randn(2, 5, I)
            torch.testing.assert_close(compiled(x_TBI), net(x_TBI), rtol=0, atol=0)
        assert not looked.called
        compiled(torch.randn(24, 5, I))
        assert looked.called  # longer ones are recorded as ever


FIRST_SEEN: bool
SECOND_SEEN: bool


def _sort_out() -> None:
    """Names that this module does not have before, as snnTorch's ``utils.reset`` makes them."""
    global FIRST_SEEN, SECOND_SEEN
    FIRST_SEEN, SECOND_SEEN = True, False


class Sorting(nn.Module):
    """A model that assigns globals in a function, and reads them in its loop; ``early``: reads one before that."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.cell, self.early = nn.GRUCell(3, 4), early

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN = x_TBI.new_zeros(x_TBI.shape[1], 4)
        if self.early and SECOND_SEEN:
            h_BN = h_BN + 1
        _sort_out()
        for t in range(x_TBI.shape[0]):
            h_BN = self.cell(x_TBI[t], h_BN) if FIRST_SEEN else self.cell(x_TBI[t], h_BN) * 2
        return h_BN + 1 if SECOND_SEEN else h_BN


def _second() -> bool:
    return SECOND_SEEN


class Asking(nn.Module):
    """A model that makes a global if it is not there yet; ``way``: how it asks."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.cell, self.way = nn.GRUCell(3, 4), way

    def fresh(self) -> bool:
        """Whether this is the first call, after which the global is there."""
        global SECOND_SEEN  # noqa: PLW0603
        if self.way == "text":
            fresh = "SECOND_SEEN" not in globals()
        else:
            try:
                fresh = SECOND_SEEN is None if self.way == "here" else _second() is None
            except NameError:
                fresh = True
        SECOND_SEEN = False
        return fresh

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN, scale = x_TBI.new_zeros(x_TBI.shape[1], 4), 0.25 if self.fresh() else 1.0
        for t in range(x_TBI.shape[0]):
            h_BN = self.cell(x_TBI[t], h_BN) * scale
        return h_BN


@pytest.fixture
def nothing_seen() -> Iterator[None]:
    yield
    for name in ("FIRST_SEEN", "SECOND_SEEN"):
        globals().pop(name, None)


@pytest.mark.usefixtures("nothing_seen")
def test_globals_may_be_made_by_the_model() -> None:
    torch.manual_seed(0)
    model = Sorting()
    run = reroll.compile(model, lowering="eager")
    for steps in (20, 31):
        run(torch.randn(steps, 2, 3)).sum().backward()
        assert globals()["FIRST_SEEN"] is True
        assert globals()["SECOND_SEEN"] is False
        reroll.check(run, torch.randn(steps, 2, 3), strict=True, measure=False, tolerance=1e-5)
    assert reroll.explain(run, torch.randn(20, 2, 3)).loops


@pytest.mark.usefixtures("nothing_seen")
def test_a_global_that_is_read_before_it_is_made_is_the_error_that_it_is() -> None:
    run = reroll.compile(Sorting(early=True), lowering="eager")
    with pytest.raises(Exception, match=r"SECOND_SEEN|not defined"):
        run(torch.randn(20, 2, 3))
    assert "SECOND_SEEN" not in globals()


@pytest.mark.usefixtures("nothing_seen")
@pytest.mark.parametrize("way", ["here", "elsewhere", "text"])
def test_a_model_that_asks_whether_a_global_is_there_makes_it(way: str) -> None:
    """It does something else at its second call, when the global is there."""
    plain, x_TBI = Asking(way), torch.randn(20, 2, 3)
    run = reroll.compile(copy.deepcopy(plain), lowering="eager")

    def shown(model: Any) -> list[Any]:
        return [model(x_TBI), globals()["SECOND_SEEN"], model(x_TBI), globals().pop("SECOND_SEEN")]

    torch.testing.assert_close(shown(run), shown(plain))


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_a_result_that_holds_tensors_out_of_sight_is_right() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, x_TBI: Tensor) -> torch.distributions.Categorical:
            h_BN, rows = x_TBI.new_zeros(x_TBI.shape[1], 4), []
            for t in range(x_TBI.shape[0]):
                h_BN = self.cell(x_TBI[t], h_BN)
                rows.append(h_BN)
            return torch.distributions.Categorical(logits=torch.stack(rows))

    net = Policy()
    run = reroll.compile(net, lowering="eager")
    for steps in (20, 9, 20):
        x_TBI, found = torch.randn(steps, 2, 3), list[Any]()
        for called in (run, net):
            given = called(x_TBI)
            assert type(given) is torch.distributions.Categorical
            found.append([given.logits, *torch.autograd.grad(given.logits.square().sum(), list(net.parameters()))])
        torch.testing.assert_close(*found)


def test_a_class_is_refused_and_its_instances_stay_as_they_are() -> None:
    class Reader(Net):
        pass

    net, x_TBI = Reader(last), torch.randn(20, 2, I)
    expected, call = net(x_TBI), Reader.__call__
    with pytest.raises(OptionError, match="the class Reader, which is no model yet"):
        reroll.compile(Reader, **EAGER)
    assert Reader.__call__ is call
    torch.testing.assert_close(net(x_TBI), expected)


def test_dimensions_by_name_are_any_mapping() -> None:
    net, x_TBI = Net(last), torch.randn(20, 2, I)
    fast = reroll.compile(net, **EAGER)
    torch.testing.assert_close(fast(x_TBI), net(x_TBI))


def test_a_model_runs_as_it_is_where_the_environment_switches_dynamo_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    net, x_TBI = Net(last), torch.randn(20, 2, I)
    fast = reroll.compile(net, **EAGER)
    assert torch.equal(fast(x_TBI), net(x_TBI))


@pytest.mark.parametrize("policy", ["warn", "error"])
def test_a_generator_runs_as_it_is_and_says_so_and_the_remedy_helps(policy: Any) -> None:
    class Yielding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, x_TBI: Tensor) -> Iterator[Tensor]:
            h_BH = x_TBI.new_zeros(x_TBI.shape[1], 4)
            for x_BI in x_TBI:
                h_BH = self.cell(x_BI, h_BH)
                yield h_BH

    class Returning(Yielding):
        def forward(self, x_TBI: Tensor) -> list[Tensor]:  # type: ignore[override]
            return list(super().forward(x_TBI))

    model, x_TBI = Returning(), torch.randn(7, 2, 3)
    expected = model(x_TBI)
    if policy == "error":
        with pytest.raises(NoRecurrenceError, match="is a generator"):
            reroll.compile(Yielding(), on_no_recurrence=policy)
    else:
        with pytest.warns(RerollWarning, match="is a generator"):
            assert len(list(reroll.compile(Yielding())(x_TBI))) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        found = reroll.compile(model, lowering="eager", on_no_recurrence="error")(x_TBI)
    for a_BH, b_BH in zip(found, expected, strict=True):
        torch.testing.assert_close(a_BH, b_BH)
