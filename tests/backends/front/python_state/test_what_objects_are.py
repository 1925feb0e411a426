"""A record holds as long as objects are what they were: beside attributes, what they are made from; keys; names."""

from __future__ import annotations

import collections
import csv
import datetime
import fractions
import functools
import gzip
import hashlib
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reroll

pytestmark = pytest.mark.usefixtures("double_precision")
STEPS = 12


def scaled(
    x_TBI: Tensor, gain: Callable[[], Any] = lambda: 1.0, act: Callable[[Tensor], Tensor] = torch.tanh
) -> Tensor:
    """Rows of a loop whose steps are scaled by what a function reads."""
    h_BI, rows = torch.zeros_like(x_TBI[0]), []
    for x_BI in x_TBI:
        h_BI = act(x_BI + h_BI * 0.5) * gain()
        rows.append(h_BI)
    return torch.stack(rows)


class Reading(nn.Module):
    """Reads an object that it holds, at each step."""

    def __init__(self, value: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.__dict__["value"] = value
        self.read = read

    def forward(self, x_TBI: Tensor) -> Tensor:
        return scaled(x_TBI, lambda: self.read(self.value))


class Base(NamedTuple):
    gain: float


class Configured(Base):
    """With attributes beside its items."""


class Members(frozenset[int]):
    pass


class Ratio(fractions.Fraction):
    pass


class Length(datetime.timedelta):
    pass


class Short(float):
    """Does not write all of its digits."""

    def __repr__(self) -> str:
        return f"{float(self):.1f}"


class Percent(float):
    def __repr__(self) -> str:
        return f"{float(self):.0%}"


class Mute(float):
    def __repr__(self) -> str:
        raise RuntimeError


class Node:
    def __init__(self, gain: float) -> None:
        self.gain, self.number = gain, 0


class Table(np.ndarray[Any, Any]):
    pass


def noted(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


def regained(nodes: Any) -> None:
    next(iter(nodes)).gain = 0.2


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "items of a tuple": (lambda: Configured(0.5), lambda value: value.gain, lambda _: Configured(0.9)),
    "a frozen set": (lambda: Members([1]), len, lambda _: Members([1, 2])),
    "a fraction": (lambda: Ratio(1, 2), float, lambda _: Ratio(1, 3)),
    "a span of time": (lambda: Length(seconds=1), lambda value: value.total_seconds(), lambda _: Length(seconds=2)),
    "how much a deque holds": (
        lambda: collections.deque([1], maxlen=2),
        lambda value: value.maxlen,
        lambda _: collections.deque([1], maxlen=3),
    ),
    "the order of a set": (lambda: {0, 8}, lambda value: 1.0 + next(iter(value)), lambda _: {8, 0}),
    "a number that is written short": (lambda: Short(0.51), lambda value: value * 1, lambda _: Short(0.54)),
    "an attribute of a number": (
        lambda: noted(Short(1), gain=0.5),
        lambda value: value.gain,
        lambda _: noted(Short(1), gain=1),
    ),
    "an object that is a key": (lambda: {Node(0.5): 0}, lambda value: next(iter(value)).gain, regained),
    "a file in memory": (
        lambda: io.StringIO("0.5"),
        lambda value: float(value.getvalue()),
        lambda _: io.StringIO("0.7"),
    ),
    "an event": (lambda: threading.Event(), lambda value: 1.0 + value.is_set(), lambda value: value.set()),
    "a polynomial": (lambda: np.poly1d([0.5]), lambda value: float(value(1.0)), lambda value: value.coeffs.fill(0.7)),
    "a text in a class of Python's": (
        lambda: collections.UserString("0.5"),
        lambda value: float(value.data),
        lambda value: setattr(value, "data", "0.7"),
    ),
    "an attribute of an array": (
        lambda: np.ones(2).view(Table),
        lambda value: getattr(value, "gain", 0.5),
        lambda value: setattr(value, "gain", 0.7),
    ),
    "a digest": (lambda: hashlib.md5(b"a"), lambda value: value.digest()[0] / 256, lambda value: value.update(b"b")),
}


@pytest.mark.parametrize("proof", ["first", "never"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_an_object_is_made_from_belongs_to_the_key(name: str, proof: Any) -> None:
    make, read, change = CHANGES[name]
    model = Reading(make(), read)
    run = reroll.compile(model, lowering="eager", proof=proof)
    x_TBI = torch.randn(STEPS, 2, 3)
    for _ in range(2):
        torch.testing.assert_close(run(x_TBI), model(x_TBI))
    new = change(model.value)
    if new is not None:
        model.__dict__["value"] = new
    torch.testing.assert_close(run(x_TBI), model(x_TBI))


@pytest.mark.parametrize("kind", [Short, Percent, Mute])
def test_a_number_of_a_class_of_ones_own_is_that_number(kind: type[float]) -> None:
    model = Reading(kind(0.1234), lambda value: value)
    run = reroll.compile(model, lowering="eager", proof="never")
    x_TBI = torch.randn(STEPS, 2, 3)
    torch.testing.assert_close(run(x_TBI), model(x_TBI))


class Counting(nn.Module):
    """Counts its calls on a key of a dict, or on a number."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.__dict__["value"] = value

    def forward(self, x_TBI: Tensor) -> Tensor:
        held: Any = next(iter(self.value)) if isinstance(self.value, dict) else self.value
        held.number += 1
        return scaled(x_TBI)


@pytest.mark.parametrize("make", [lambda: {Node(1): 0}, lambda: noted(Short(1), number=0)])
def test_what_is_counted_there_is_counted_once_a_call(make: Callable[[], Any]) -> None:
    model = Counting(make())
    run = reroll.compile(model, lowering="eager")
    for call in range(1, 5):
        run(torch.randn(STEPS, 2, 3))
        held: Any = next(iter(model.value)) if isinstance(model.value, dict) else model.value
        assert held.number == call


def sine(value: Tensor) -> Tensor:
    return torch.sin(value)


class Gained:
    def __init__(self, gain: float) -> None:
        self.gain = gain

    def act(self, value: Tensor) -> Tensor:
        return torch.tanh(value * self.gain)


ACTS, GAINED, TABLES = {"a": torch.tanh, "b": sine, "c": scaled}, [Gained(1), Gained(2)], [np.ones(1), np.ones(1) * 2]
ACT: Any = sine
BOUND: Any = GAINED[0].act
TABLE: Any = TABLES[0]


def by_function(x_TBI: Tensor) -> Tensor:
    act = ACT
    return scaled(x_TBI, act=act) + len(ACTS)


def by_method(x_TBI: Tensor) -> Tensor:
    act = BOUND
    return scaled(x_TBI, act=act) + len(GAINED)


def by_table(x_TBI: Tensor) -> Tensor:
    gain = float(TABLE[0])
    return scaled(x_TBI, lambda: gain) + len(TABLES)


def another(value: Tensor) -> Tensor:
    return torch.sigmoid(value)


SWITCHES: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "ACT": (by_function, another),
    "BOUND": (by_method, GAINED[1].act),
    "TABLE": (by_table, TABLES[1]),
}
ACTS["d"] = another


@pytest.mark.parametrize("name", SWITCHES)
def test_which_of_several_stands_for_a_name_belongs_to_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, other = SWITCHES[name]
    run = reroll.compile(form, lowering="eager", proof="never")
    x_TBI = torch.randn(STEPS, 2, 3)
    for _ in range(2):
        torch.testing.assert_close(run(x_TBI), form(x_TBI))
    monkeypatch.setitem(globals(), name, other)
    torch.testing.assert_close(run(x_TBI), form(x_TBI))


class Hidden(nn.Module):
    """A class attribute named as Python names its own."""

    __gain__ = 0.5

    def forward(self, x_TBI: Tensor) -> Tensor:
        return scaled(x_TBI, lambda: self.__gain__)


def test_a_class_attribute_named_as_pythons_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Hidden()
    run = reroll.compile(model, lowering="eager", proof="never")
    x_TBI = torch.randn(STEPS, 2, 3)
    torch.testing.assert_close(run(x_TBI), model(x_TBI))
    monkeypatch.setattr(Hidden, "__gain__", 0.9)
    torch.testing.assert_close(run(x_TBI), model(x_TBI))


class Rows(dict[str, Tensor]):
    pass


def with_attribute(x_TBI: Tensor) -> Any:
    found = Rows(rows=scaled(x_TBI))
    found.last = found["rows"][-1]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("proof", ["first", "never"])
def test_attributes_of_results_are_those_of_the_call(proof: Any) -> None:
    run = reroll.compile(with_attribute, lowering="eager", proof=proof)
    for _ in range(3):
        found = run(torch.randn(STEPS, 2, 3))
        torch.testing.assert_close(found.last, found["rows"][-1])


class Twice(nn.Module):
    """One list in two attributes."""

    fast: Any = None

    def forward(self, x_TBI: Tensor) -> Tensor:
        if self.fast is None:
            self.fast = self.slow = [torch.zeros_like(x_TBI[0])]
        rows = scaled(x_TBI) + self.slow[0]
        self.fast[0] = rows[-1].detach()
        return rows


@pytest.mark.parametrize("proof", ["first", "never"])
def test_one_list_in_two_attributes_stays_one(proof: Any) -> None:
    model, plain = Twice(), Twice()
    run = reroll.compile(model, lowering="eager", proof=proof)
    for _ in range(4):
        x_TBI = torch.randn(STEPS, 2, 3)
        torch.testing.assert_close(run(x_TBI), plain(x_TBI))
    assert model.fast is model.slow


@pytest.mark.parametrize("proof", ["first", "never"])
def test_results_stand_under_keys_of_the_call(proof: Any) -> None:
    run = reroll.compile(lambda x, node: {node: scaled(x)}, lowering="eager", proof=proof)
    for _ in range(3):
        node = Node(1)
        found: Any = run(torch.randn(STEPS, 2, 3), node)  # type: ignore[no-untyped-call]
        assert next(iter(found)) is node


class Given(NamedTuple):
    slope: float


class Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, given: Given) -> Tensor:
        ctx.save_for_backward(value)
        ctx.slope = given.slope
        return (value > 0).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (value,) = ctx.saved_tensors
        return grad / (1 + ctx.slope * value.abs()), None


def test_functions_are_given_the_objects_that_they_are_given() -> None:
    def spikes(x_TBI: Tensor) -> Tensor:
        return scaled(x_TBI, act=lambda value: Surrogate.apply(value, Given(3.0)))  # type: ignore[no-untyped-call]

    x_TBI = torch.randn(STEPS, 2, 3, requires_grad=True)
    run = reroll.compile(spikes, lowering="eager")
    expected, found = (torch.autograd.grad(each(x_TBI).sum(), x_TBI) for each in (spikes, run))
    torch.testing.assert_close(found, expected)


def test_a_mode_that_a_forward_leaves_is_none_of_its_callers() -> None:
    def leaves(x_TBI: Tensor) -> Tensor:
        rows = scaled(x_TBI)
        torch.set_grad_enabled(False)
        return rows

    x_TBI = torch.randn(STEPS, 2, 3, requires_grad=True)
    run = reroll.compile(leaves, lowering="eager", proof="never")
    with torch.enable_grad():
        assert run(x_TBI).requires_grad


def print_to(file: Any) -> None:
    print("x", file=file)


def row_to(file: Any) -> None:
    csv.writer(file).writerow([1])


def pickle_to(file: Any) -> None:
    pickle.dump(1, file.buffer)


def map_to(file: Any) -> None:
    list(map(file.write, ["x"]))


class Writing(nn.Module):
    """Does something with an object that it holds."""

    def __init__(self, value: Any, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.value, self.act = value, act

    def forward(self, x_TBI: Tensor) -> Tensor:
        self.act(self.value)
        return scaled(x_TBI)


@pytest.mark.parametrize("proof", ["first", "never"])
@pytest.mark.parametrize("act", [print_to, row_to, pickle_to, map_to])
def test_c_code_writes_files_once_a_call(act: Callable[[Any], Any], proof: Any, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        run = reroll.compile(Writing(file, act), lowering="eager", proof=proof)
        sizes = []
        for _ in range(4):
            run(torch.randn(STEPS, 2, 3))
            file.flush()
            sizes.append((tmp_path / "file").stat().st_size)
    assert sizes == [sizes[0] * call for call in range(1, 5)]
    assert sizes[0] > 0


@pytest.mark.parametrize("proof", ["first", "never"])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_lines_of_files_are_read_once_a_call(mode: str, proof: Any, tmp_path: Path) -> None:
    text = "".join(f"{line / 8}\n" for line in range(1, 20))
    (tmp_path / "file").write_text(text)
    with (tmp_path / "file").open(mode) as file, (tmp_path / "file").open() as other:
        plain, model = (Reading(each, lambda value: float(next(value))) for each in (other, file))
        run = reroll.compile(model, lowering="eager", proof=proof)
        for _ in range(3):
            x_TBI = torch.randn(5, 2, 3)
            torch.testing.assert_close(run(x_TBI), plain(x_TBI))
    assert (tmp_path / "file").read_text() == text


@pytest.mark.parametrize("proof", ["first", "never"])
def test_methods_of_lists_are_followed_to_the_list(proof: Any) -> None:
    rows = list[int]()
    run = reroll.compile(Writing(rows.append, lambda append: append(1)), lowering="eager", proof=proof)
    for call in range(1, 5):
        run(torch.randn(STEPS, 2, 3))
        assert len(rows) == call


class Dotted(dict[str, Any]):
    """Items as attributes: what is asked of it must not be answered by its items."""

    __getattr__ = dict.__getitem__


def test_dicts_whose_items_are_attributes_are_followed_and_given() -> None:
    config: Any = Dotted(gain=0.5)

    def form(x_TBI: Tensor) -> Any:
        return Dotted(rows=scaled(x_TBI, lambda: config.gain))

    run: Any = reroll.compile(form, lowering="eager", proof="never")
    x_TBI = torch.randn(STEPS, 2, 3)
    for gain in (0.5, 0.5, 0.7):
        config["gain"] = gain
        torch.testing.assert_close(run(x_TBI).rows, form(x_TBI).rows)
    assert not run.reroll_caller.is_read


def test_a_cache_of_what_is_no_function_is_known() -> None:
    kept = functools.cache(functools.partial(sine))
    rows = functools.cache(len)
    run: Any = reroll.compile(lambda x: scaled(x, lambda: kept is not None and rows is not None), lowering="eager")
    x_TBI = torch.randn(STEPS, 2, 3)
    torch.testing.assert_close(run(x_TBI), scaled(x_TBI))


@pytest.mark.parametrize("kind", ["in memory", "an archive", "taken from its buffer"])
def test_files_that_are_none_of_the_system_are_held(kind: str, tmp_path: Path) -> None:
    file: Any = io.TextIOWrapper(io.BytesIO()) if kind != "an archive" else gzip.open(tmp_path / "file", "wt")  # noqa: SIM115
    if kind == "taken from its buffer":
        file.detach()
    run = reroll.compile(Writing(file, lambda _: None), lowering="eager")
    x_TBI = torch.randn(STEPS, 2, 3)
    for _ in range(2):
        torch.testing.assert_close(run(x_TBI), scaled(x_TBI))
