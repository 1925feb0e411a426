"""Loops over a number, wherever it is: an attribute, an argument, a global, a variable around."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.planning.options import Lowering

EAGER: dict[str, Any] = {"lowering": "eager", "schedule": "standard", "segment": 2, "chunk": 3}
num_steps = 20


class Static(nn.Module):
    """The same input at every step, as often as an attribute says."""

    def __init__(self, steps: int = 20) -> None:
        super().__init__()
        self.num_steps, self.config = steps, SimpleNamespace(steps=steps)
        self.fc, self.rec = nn.Linear(4, 5, dtype=torch.float64), nn.Linear(5, 5, dtype=torch.float64)

    def count(self) -> int:
        """How many steps there are."""
        return self.num_steps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, rows = x.new_zeros(x.shape[0], 5), []
        for step in range(self.count()):
            h = torch.tanh(self.fc(x) + self.rec(h) * (1 + 0.1 * step / self.num_steps))
            rows.append(h)
        return torch.stack(rows), h


class ByPath(Static):
    def count(self) -> int:
        return int(self.config.steps)


class ByGlobal(Static):
    def __init__(self) -> None:
        super().__init__()
        del self.num_steps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, rows = x.new_zeros(x.shape[0], 5), []
        for _ in range(num_steps):
            h = torch.tanh(self.fc(x) + self.rec(h))
            rows.append(h)
        return torch.stack(rows), h


def by_parameter(x: Tensor, w: Tensor, num_steps: int = 12, scale: float = 0.5) -> Tensor:
    """As often as an argument says."""
    h = x
    for _ in range(num_steps):
        h = torch.tanh(x * scale + h @ w)
    return h


def data() -> Tensor:
    """A batch without time."""
    return torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("model", [Static, ByGlobal, ByPath])
def test_the_number_of_steps_is_read_where_it_is(model: type[Static]) -> None:
    torch.manual_seed(0)
    run = reroll.compile(model(), **EAGER)
    reroll.check(run, data(), strict=True, measure=False)
    assert [loop.recurrence.steps for loop in reroll.explain(run, data()).loops] == [20]


def test_a_number_that_changes_is_another_length_and_nothing_compiles_again() -> None:
    torch.manual_seed(0)
    net = Static()
    run: Any = reroll.compile(net, **EAGER)
    for steps in (20, 7, 50, 33, 1, 2, 20, 14, 28):
        net.num_steps = steps
        reroll.check(run, data(), strict=True, measure=False)
        assert net.num_steps == steps
    assert not run.reroll_caller.is_read
    with torch.no_grad():
        net.num_steps = 1000
        assert run(data())[0].shape[0] == 1000
    counts = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    net.num_steps = 31
    run(data())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counts


def test_a_parameter_counts_wherever_it_is_given() -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    run = reroll.compile(by_parameter, **EAGER)
    ways: list[tuple[Any, dict[str, Any]]] = [
        ((), {}),
        ((9,), {}),
        ((25, 0.2), {}),
        ((), {"num_steps": 30, "scale": 0.1}),
    ]
    for args, kwargs in ways:
        check: Any = reroll.check
        check(run, data(), w, *args, strict=True, measure=False, **kwargs)


def test_a_variable_of_an_enclosing_function_counts() -> None:
    steps, w = 16, torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def forward_pass(x: Tensor) -> list[Tensor]:
        rows, h = [], x
        for _ in range(steps):
            h = torch.tanh(x + h @ w)
            rows.append(h)
        return rows

    run = reroll.compile(forward_pass, **EAGER)
    for steps in (16, 33):  # noqa: B007  # the function reads it
        reroll.check(run, data(), strict=True, measure=False)


def test_a_method_counts_by_its_object() -> None:
    net = Static()
    run = reroll.compile(net.forward, **EAGER)
    reroll.check(run, data(), strict=True, measure=False)


def test_numbers_and_sequences_stand_beside_each_other() -> None:
    class Both(Static):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, rows = x.new_zeros(x.shape[1], 5), []
            for t in range(self.num_steps):
                h = torch.tanh(self.fc(x[t]) + self.rec(h))
                rows.append(h)
            return torch.stack(rows), h

    net = Both()
    run = reroll.compile(net, **EAGER)
    for steps, number in ((20, 20), (21, 20), (21, 9)):
        net.num_steps = number
        x = torch.randn(steps, 3, 4, dtype=torch.float64, requires_grad=True)
        reroll.check(run, x, strict=True, measure=False)
    assert [loop.recurrence.steps for loop in reroll.explain(run, x).loops] == [9]


def test_what_dynamo_does_not_read_is_recorded() -> None:
    class Unreadable(Static):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            torch._dynamo.graph_break()
            return super().forward(x)

    net = Unreadable()
    run = reroll.compile(net, **EAGER)
    for steps in (20, 11, 40):
        net.num_steps = steps
        reroll.check(run, data(), strict=True, measure=False)


def test_two_threads_see_only_what_the_user_set() -> None:
    torch.manual_seed(0)
    net, x = Static(40), data().detach()
    failed = list[int]()
    run = reroll.compile(net, **EAGER)
    run(x)
    expected = copy.deepcopy(net)(x)[1]

    def calls() -> None:
        failed.extend(_ for _ in range(15) if not torch.allclose(run(x)[1], expected, atol=1e-12))

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
    assert net.num_steps == 40


def test_the_number_is_put_back_after_an_error() -> None:
    class Failing(Static):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            raise ValueError("of the model's own")

    net = Failing()
    with pytest.raises(ValueError, match="model's own"):
        reroll.compile(net, **EAGER)(data())
    assert net.num_steps == 20


class Fixed(Static):
    @property
    def length(self) -> int:
        """A number that cannot be set."""
        return 20

    def count(self) -> int:
        return self.length


@pytest.mark.parametrize("make", [ByGlobal, Fixed, lambda: ByLoop(100)], ids=["global", "property", "in the forward"])
def test_a_loop_over_a_number_is_rolled_at_any_batch(make: Any) -> None:
    compiled: Any = reroll.compile(make(), **EAGER)
    for rows in (3, 2, 3):
        x = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
        reroll.check(compiled, x, strict=True, measure=False)
    assert sum(loop.recurrence.steps for loop in reroll.explain(compiled, x).loops) >= 20
    assert not compiled.reroll_caller.is_read


def test_no_step_at_all_is_the_error_that_it_is() -> None:
    net = Static(0)
    run = reroll.compile(net, **EAGER)
    with pytest.raises(RuntimeError, match="non-empty TensorList"):
        run(data())
    net.num_steps = 20
    reroll.check(run, data(), strict=True, measure=False)


def _draws(*_: Any) -> None:
    torch.rand(())


def test_a_very_long_one_is_recorded_without_dynamo_and_draws_as_often_as_the_model() -> None:
    model, x, found = ByLoop(600), data(), list[Any]()
    model.fc.register_forward_pre_hook(_draws)
    run: Any = reroll.compile(model, **EAGER)
    torch._dynamo.utils.counters.clear()
    for called in (run, model, run, model):
        torch.manual_seed(0)
        model.zero_grad()
        called(x)[0].sum().backward()
        found.append([*(each.grad for each in model.parameters()), torch.rand(2)])
    torch.testing.assert_close(found[0::2], found[1::2])
    assert not torch._dynamo.utils.counters["stats"]
    assert [loop.recurrence.steps for loop in reroll.explain(run, x).loops] == [600]


class ByLoop(Static):
    """The range is in the forward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[0], 5)
        for _ in range(self.num_steps):
            h = torch.tanh(self.fc(x) + self.rec(h))
        return h, h


class Sequence(nn.Module):
    """A loop over the first dimension, which Dynamo reads or not."""

    def __init__(self, readable: bool) -> None:
        super().__init__()
        self.fc, self.rec, self.readable = nn.Linear(4, 5).double(), nn.Linear(5, 5).double(), readable

    def forward(self, x: Tensor) -> Tensor:
        if not self.readable:
            torch._dynamo.graph_break()
        h = x.new_zeros(x.shape[1], 5)
        for t in range(x.shape[0]):
            h = torch.tanh(self.fc(x[t]) + self.rec(h))
        return h


@pytest.mark.usefixtures("unproved")  # copies for a proof lie in another way
@pytest.mark.variants(4)
@pytest.mark.filterwarnings("ignore:The model asks")
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_static_input_may_be_expanded_over_time(lowering: Lowering, readable: bool, needs_gradient: bool) -> None:
    image = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=needs_gradient)
    run: Any = reroll.compile(Sequence(readable), lowering=lowering)
    for steps in (30, 12):
        reroll.check(run, image.expand(steps, 3, 4), strict=True, measure=False)
    plain = copy.deepcopy(run._orig_mod)
    plain.readable = True
    for model in (run, plain):
        model(image.expand(30, 3, 4)).square().sum().backward()
    for found, expected in zip(run.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_a_number_of_numpys_counts() -> None:
    net: Any = Static()
    net.num_steps = np.int64(20)
    run = reroll.compile(net, **EAGER)
    reroll.check(run, data(), strict=True, measure=False)
    assert type(net.num_steps) is np.int64


def test_an_array_of_numpys_is_the_error_that_it_is() -> None:
    net = nn.RNN(4, 5)
    with pytest.raises(AttributeError, match=r"'numpy\.ndarray' object has no attribute 'dim'"):
        reroll.compile(net, **EAGER)(np.zeros((20, 3, 4), np.float32))


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
@pytest.mark.parametrize("nested", [True, False], ids=["torch.cond", "torch.where"])
def test_other_rows_at_other_lengths(nested: bool) -> None:
    class Saturating(nn.Module):
        """Reads other rows at other lengths."""

        def forward(self, x: Tensor) -> Tensor:
            h = x[0]
            for t in range(x.shape[0]):
                u = x[t] + x.unfold(0, 3, 3)[-1].mean(-1)
                if nested:
                    h = torch.cond(h.sum() > 0, lambda u, h: u * h, lambda u, h: u - h, (u, h))
                else:
                    h = torch.where(h.sum() > 0, u * h, u - h)
            return h

    compiled = reroll.compile(Saturating(), **EAGER)
    for steps in (12, 14, 12):
        x = torch.randn(steps, 3, 4, requires_grad=True)
        reroll.check(compiled, x, strict=True, measure=False)
    assert [loop.recurrence.steps for loop in reroll.explain(compiled, x).loops] == [12]
