"""Loops over a number: ``reroll.compile(model, steps="num_steps")``."""

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
from reroll.backends.front import observe
from reroll.backends.front.entries import Running
from reroll.errors import LengthError, OptionError, RerollWarning
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


@pytest.mark.parametrize(("model", "steps"), [(Static, "num_steps"), (ByGlobal, "num_steps"), (ByPath, "config.steps")])
def test_the_number_of_steps_is_read_where_it_is(model: type[Static], steps: str) -> None:
    torch.manual_seed(0)
    run = reroll.compile(model(), steps=steps, **EAGER)
    reroll.check(run, data(), strict=True, measure=False)
    assert len(reroll.explain(run, data()).loops) == 1


def test_a_number_that_changes_is_another_length_and_nothing_compiles_again() -> None:
    torch.manual_seed(0)
    net = Static()
    run = reroll.compile(net, steps="num_steps", **EAGER)
    for steps in (20, 7, 50, 1, 2, 20):
        net.num_steps = steps
        reroll.check(run, data(), strict=True, measure=False)
        assert net.num_steps == steps
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
    run = reroll.compile(by_parameter, steps="num_steps", **EAGER)
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

    run = reroll.compile(forward_pass, steps="steps", **EAGER)
    for steps in (16, 33):  # noqa: B007  # the function reads it
        reroll.check(run, data(), strict=True, measure=False)


def test_a_method_counts_by_its_object() -> None:
    net = Static()
    run = reroll.compile(net.forward, steps="num_steps", **EAGER)
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
    run = reroll.compile(net, time_dim=0, steps="num_steps", **EAGER)
    x = torch.randn(20, 3, 4, dtype=torch.float64, requires_grad=True)
    reroll.check(run, x, strict=True, measure=False)
    with pytest.raises(OptionError, match="is 20, but the time dimensions that time_dim=0 names are 21 long"):
        run(torch.randn(21, 3, 4, dtype=torch.float64))


def test_what_dynamo_does_not_read_is_recorded() -> None:
    class Unreadable(Static):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            torch._dynamo.graph_break()
            return super().forward(x)

    net = Unreadable()
    run = reroll.compile(net, steps="num_steps", **EAGER)
    for steps in (20, 11, 40):
        net.num_steps = steps
        reroll.check(run, data(), strict=True, measure=False)


def test_two_threads_see_only_what_the_user_set() -> None:
    torch.manual_seed(0)
    net, x = Static(40), data().detach()
    failed = list[int]()
    run = reroll.compile(net, steps="num_steps", **EAGER)
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
        reroll.compile(net, steps="num_steps", **EAGER)(data())
    assert net.num_steps == 20


class Fixed(Static):
    @property
    def length(self) -> int:
        """A number that cannot be set."""
        return 20

    def count(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("net", "steps", "match"),
    [
        (Static(), "nun_steps", "is no parameter of the model, no attribute of it"),
        (ByGlobal(), "steps", r"steps='num_steps' names that of a loop over range\(num_steps\), which is 20"),
        (Static(), "config.number", "must name a number of steps.*but it is not there"),
        (Static(), "config.number.of", "must name a number of steps.*but it is not there"),
        (Static(), "fc", "a whole number from 1 on, but it is Linear"),
        (Static(0), "num_steps", "a whole number from 1 on, but it is 0, int"),
        (Static(), "fc.in_features", "operations whatever that number is"),
        (Fixed(), "length", "cannot be set"),
        (Static(), 20, "must be the name of the model's number of steps"),
    ],
)
def test_a_name_that_says_nothing_is_refused(net: nn.Module, steps: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        reroll.compile(net, steps=steps, **EAGER)(data())


@pytest.mark.parametrize("make", [ByGlobal, lambda: ByLoop(100)])
def test_a_loop_over_a_number_is_rolled_at_its_length_and_named(make: Any) -> None:
    compiled, x = reroll.compile(make(), time_dim=0, **EAGER), data()
    reroll.check(compiled, x, strict=True, measure=False)
    assert compiled.reroll_caller.alone == {3}
    with pytest.warns(RerollWarning, match=r"If the loop is not over that: steps='num_steps' names that of a loop"):
        compiled(x[:2])


def test_a_very_long_one_is_refused_before_dynamo_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few short lengths are enough, and they leave random numbers as they were."""
    lengths, model, traced = list[int](), ByLoop(600), observe._traced

    def noted(model: Any, call: Any, length: int, *rest: Any) -> Any:
        lengths.append(length)
        return traced(model, call, length, *rest)

    model.fc.register_forward_pre_hook(lambda *_: torch.rand(()) and None)
    monkeypatch.setattr(observe, "_traced", noted)
    monkeypatch.setattr(Running, "attempt", None)
    x, state = data(), torch.get_rng_state()
    with pytest.raises(LengthError, match="steps='num_steps' names that of a loop over range"):
        reroll.compile(model, time_dim=0, **EAGER)(x)
    assert lengths == [6, 7, 6, 16, 17, 6]  # the third of each is along the other dimension
    assert torch.equal(torch.get_rng_state(), state)


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
    run: Any = reroll.compile(Sequence(readable), time_dim=0, lowering=lowering)
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
    run = reroll.compile(net, steps="num_steps", **EAGER)
    reroll.check(run, data(), strict=True, measure=False)
    assert type(net.num_steps) is np.int64


def test_an_array_of_numpys_is_named() -> None:
    net = nn.RNN(4, 5)
    with pytest.raises(OptionError, match=r"\[20, 3, 4\] here, is no tensor: give torch.from_numpy"):
        reroll.compile(net, time_dim=0, **EAGER)(np.zeros((20, 3, 4), np.float32))


@pytest.mark.parametrize("nested", [True, False], ids=["torch.cond", "torch.where"])
def test_a_search_for_a_pattern_takes_no_longer_than_what_it_saves(
    nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, traced = list[int](), observe._traced

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

    def noted(model: Any, call: Any, length: int, *rest: Any) -> Any:
        lengths.append(length)
        return traced(model, call, length, *rest)

    monkeypatch.setattr(observe, "_traced", noted)
    compiled, x = reroll.compile(Saturating(), time_dim=0, **EAGER), torch.randn(12, 3, 4, requires_grad=True)
    if nested:
        with pytest.raises(LengthError, match="short traces do not explain"):
            compiled(x)
    else:
        reroll.check(compiled, x, strict=True, measure=False)
        assert compiled.reroll_caller.alone == {12}
    assert sum(lengths) <= 3 * 40  # as many as a few attempts take
