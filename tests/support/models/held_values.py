"""What a model may hold: values of every kind, what comes in their place, and how they change in their place."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import decimal
import enum
import fractions
import functools
import logging
import math
import operator
import threading
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

D = torch.float64


def number(value: Any) -> Any:
    """A factor from a value of any kind."""
    if isinstance(value, Tensor | float | int):
        return value
    if callable(value):
        return value(0.5)
    if value is None:
        return 0.3
    if isinstance(
        value, str | bytes | list | tuple | set | frozenset | dict | collections.deque | collections.UserDict
    ):
        return 0.1 * len(value)
    return float(value)


class Choice(enum.Enum):
    SLOW = 0.1
    FAST = 0.7


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()


@dataclasses.dataclass
class Data:
    slope: Any = 0.5


@dataclasses.dataclass(frozen=True)
class Frozen:
    slope: Any = 0.5


@dataclasses.dataclass(slots=True)
class SlottedData:
    slope: Any = 0.5


class Slots:
    __slots__ = ("slope",)

    def __init__(self, slope: Any = 0.5) -> None:
        self.slope = slope


class Pair(NamedTuple):
    slope: Any
    other: int = 1


class Own:
    slope: Any = 0.5

    def method(self, x: Any) -> Any:
        return x * number(self.slope)

    def __call__(self, x: Any) -> Any:
        return x * number(self.slope)


class Forwarding:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["held"][name]


class Descriptor:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self.value


def twice(x: Any) -> Any:
    return 2 * x


def scaled(x: Any, by: Any) -> Any:
    return x * by


# Values: what stands there before and after, and how a factor is made of it.
VALUES: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], Any]]] = {
    "float": (lambda: 0.5, lambda: 0.9, number),
    "int": (lambda: 1, lambda: 2, number),
    "bool": (lambda: False, lambda: True, lambda v: 0.5 if v else 0.9),
    "none": (lambda: None, lambda: 0.9, number),
    "text": (lambda: "relu", lambda: "tanhs", number),
    "bytes": (lambda: b"a", lambda: b"ab", number),
    "complex": (lambda: 0.5 + 1j, lambda: 0.9 + 1j, lambda v: v.real),
    "zero": (lambda: 0.0, lambda: -0.0, lambda v: 0.5 if math.copysign(1, v) > 0 else 0.9),
    "int or float": (lambda: 1, lambda: 1.0, lambda v: 0.5 if isinstance(v, int) else 0.9),
    "int or bool": (lambda: 1, lambda: True, lambda v: 0.5 if isinstance(v, bool) else 0.9),
    "tensor": (lambda: torch.full((4,), 0.5, dtype=D), lambda: torch.full((4,), 0.9, dtype=D), number),
    "tensor of a size": (lambda: torch.ones(2, dtype=D), lambda: torch.ones(5, dtype=D), lambda v: v.sum() * 0.1),
    "tensor or number": (lambda: torch.tensor(0.5, dtype=D), lambda: 0.9, number),
    "parameter": (
        lambda: nn.Parameter(torch.tensor(0.5, dtype=D)),
        lambda: nn.Parameter(torch.tensor(0.9, dtype=D)),
        number,
    ),
    "enum": (lambda: Choice.SLOW, lambda: Choice.FAST, lambda v: v.value),
    "flag": (lambda: Flags.A, lambda: Flags.A | Flags.B, lambda v: 0.9 if Flags.B in v else 0.5),
    "data": (lambda: Data(0.5), lambda: Data(0.9), lambda v: v.slope),
    "frozen": (lambda: Frozen(0.5), lambda: Frozen(0.9), lambda v: v.slope),
    "slotted": (lambda: SlottedData(0.5), lambda: SlottedData(0.9), lambda v: v.slope),
    "slots": (lambda: Slots(0.5), lambda: Slots(0.9), lambda v: v.slope),
    "pair": (lambda: Pair(0.5), lambda: Pair(0.9), lambda v: v.slope),
    "tuple": (lambda: (0.5, 1), lambda: (0.9, 1), lambda v: v[0]),
    "list": (lambda: [0.5, 1], lambda: [0.9, 1], lambda v: v[0]),
    "dict": (lambda: {"a": {"b": 0.5}}, lambda: {"a": {"b": 0.9}}, lambda v: v["a"]["b"]),
    "order": (lambda: {"a": 0.5, "b": 0.9}, lambda: {"b": 0.9, "a": 0.5}, lambda v: next(iter(v.values()))),
    "set": (lambda: {1, 2}, lambda: {1, 2, 3}, number),
    "frozenset": (lambda: frozenset({1}), lambda: frozenset({1, 2}), number),
    "ordered": (
        lambda: collections.OrderedDict(a=0.5),
        lambda: collections.OrderedDict(a=0.9),
        lambda v: v["a"],
    ),
    "deque": (lambda: collections.deque([0.5]), lambda: collections.deque([0.9]), lambda v: v[0]),
    "default dict": (
        lambda: collections.defaultdict(lambda: 0.5),
        lambda: collections.defaultdict(lambda: 0.9),
        lambda v: v.default_factory(),
    ),
    "counter": (lambda: collections.Counter("aa"), lambda: collections.Counter("aaa"), lambda v: 0.1 * v["a"]),
    "chain map": (
        lambda: collections.ChainMap({}, {"a": 0.5}),
        lambda: collections.ChainMap({"a": 0.9}),
        lambda v: v["a"],
    ),
    "user dict": (lambda: collections.UserDict(a=1), lambda: collections.UserDict(a=1, b=2), number),
    "namespace": (
        lambda: types.SimpleNamespace(slope=0.5),
        lambda: types.SimpleNamespace(slope=0.9),
        lambda v: v.slope,
    ),
    "parsed": (lambda: argparse.Namespace(slope=0.5), lambda: argparse.Namespace(slope=0.9), lambda v: v.slope),
    "numpy number": (lambda: np.float64(0.5), lambda: np.float64(0.9), float),
    "numpy int": (lambda: np.int32(1), lambda: np.int32(2), float),
    "numpy array": (lambda: np.array([0.5]), lambda: np.array([0.9]), lambda v: float(v[0])),
    "numpy objects": (lambda: np.array([0.5], object), lambda: np.array([0.9], object), lambda v: v[0]),
    "array": (lambda: array.array("d", [0.5]), lambda: array.array("d", [0.9]), lambda v: v[0]),
    "bytearray": (lambda: bytearray(b"a"), lambda: bytearray(b"b"), lambda v: v[0] * 0.005),
    "memory view": (lambda: memoryview(b"a"), lambda: memoryview(b"b"), lambda v: v[0] * 0.005),
    "fraction": (lambda: fractions.Fraction(1, 2), lambda: fractions.Fraction(9, 10), float),
    "decimal": (lambda: decimal.Decimal("0.5"), lambda: decimal.Decimal("0.9"), float),
    "path": (lambda: PurePosixPath("a"), lambda: PurePosixPath("abc"), lambda v: 0.1 * len(str(v))),
    "range": (lambda: range(3), lambda: range(7), lambda v: 0.1 * len(v)),
    "slice": (lambda: slice(0, 3), lambda: slice(0, 7), lambda v: 0.1 * v.stop),
    "partial": (
        lambda: functools.partial(scaled, by=0.5),
        lambda: functools.partial(scaled, by=0.9),
        lambda v: v(1.0),
    ),
    "lambda": (lambda: lambda x: x * 0.5, lambda: lambda x: x * 0.9, lambda v: v(1.0)),
    "function": (lambda: abs, lambda: twice, lambda v: v(0.4)),
    "torch function": (lambda: torch.sin, lambda: torch.cos, lambda v: v(torch.ones(4, dtype=D))),
    "method": (lambda: made(Own, 0.5).method, lambda: made(Own, 0.9).method, lambda v: v(1.0)),
    "callable": (lambda: made(Own, 0.5), lambda: made(Own, 0.9), lambda v: v(1.0)),
    "getter": (lambda: operator.itemgetter(0), lambda: operator.itemgetter(1), lambda v: v((0.5, 0.9))),
    "class": (lambda: Data, lambda: Frozen, lambda v: 0.5 if v is Data else 0.9),
    "module": (lambda: nn.Linear(4, 4, dtype=D), lambda: nn.Tanh(), lambda v: v(torch.ones(4, dtype=D))),
    "module of math": (lambda: math, lambda: torch, lambda v: 0.5 if v is math else 0.9),
    "dtype": (lambda: torch.float32, lambda: torch.float64, lambda v: torch.full((), 1 / 3, dtype=v).double()),
    "mapping": (
        lambda: types.MappingProxyType({"a": 0.5}),
        lambda: types.MappingProxyType({"a": 0.9}),
        lambda v: v["a"],
    ),
    "forwarding": (lambda: Forwarding({"slope": 0.5}), lambda: Forwarding({"slope": 0.9}), lambda v: v.slope),
    "context variable": (lambda: ContextVar("a", default=0.5), lambda: ContextVar("a", default=0.9), lambda v: v.get()),
    "string of text": (lambda: ["a", "b"], lambda: ["b", "a"], lambda v: 0.5 if v[0] == "a" else 0.9),
    "nested": (lambda: [{"a": ({"b": [0.5]},)}], lambda: [{"a": ({"b": [0.9]},)}], lambda v: v[0]["a"][0]["b"][0]),
    "empty": (list, lambda: [0.5], lambda v: 0.9 if v else 0.3),
    "nan": (lambda: float("nan"), lambda: 0.9, lambda v: 0.5 if v != v else v),
    "generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda: torch.Generator().manual_seed(2),
        lambda v: 0.1 * v.initial_seed(),
    ),
}


class Other(Own):
    def __call__(self, x: Any) -> Any:
        return x * 0.9


KEPT = (Data(0.5), Data(0.9))


def weak_values() -> Any:
    """A dict that holds weakly."""
    return weakref.WeakValueDictionary(a=KEPT[0])


def threaded() -> Any:
    """Attributes of this thread."""
    found = threading.local()
    found.slope = 0.5
    return found


def with_attribute() -> Any:
    """A function with an attribute."""

    def found() -> float:
        return 0.5

    found.slope = 0.5  # type: ignore[attr-defined]
    return found


def cached() -> Any:
    """A function that remembers."""
    settings = {"a": 0.5}

    @functools.lru_cache
    def found() -> float:
        return settings["a"]

    found.settings = settings  # type: ignore[attr-defined]
    return found


def made(of: Any, slope: Any) -> Any:
    """An object with an attribute."""
    found = of()
    found.slope = slope
    return found


# What is changed in its place: make, change, change back, how a factor is made of it.
IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "data": (Data, lambda v: setattr(v, "slope", 0.9), lambda v: setattr(v, "slope", 0.5), lambda v: v.slope),
    "slotted data": (
        SlottedData,
        lambda v: setattr(v, "slope", 0.9),
        lambda v: setattr(v, "slope", 0.5),
        lambda v: v.slope,
    ),
    "slots": (Slots, lambda v: setattr(v, "slope", 0.9), lambda v: setattr(v, "slope", 0.5), lambda v: v.slope),
    "frozen": (
        Frozen,
        lambda v: object.__setattr__(v, "slope", 0.9),
        lambda v: object.__setattr__(v, "slope", 0.5),
        lambda v: v.slope,
    ),
    "list": (lambda: [0.5], lambda v: v.__setitem__(0, 0.9), lambda v: v.__setitem__(0, 0.5), lambda v: v[0]),
    "longer list": (lambda: [1], lambda v: v.append(1), lambda v: v.pop(), lambda v: 0.3 * len(v)),
    "dict": (lambda: {"a": 0.5}, lambda v: v.update(a=0.9), lambda v: v.update(a=0.5), lambda v: v["a"]),
    "new key": (lambda: {"a": 0.5}, lambda v: v.update(b=0.9), lambda v: v.pop("b"), lambda v: v.get("b", 0.5)),
    "order": (
        lambda: collections.OrderedDict(a=0.5, b=0.9),
        lambda v: v.move_to_end("a"),
        lambda v: v.move_to_end("b"),
        lambda v: next(iter(v.values())),
    ),
    "set": (lambda: {1}, lambda v: v.add(2), lambda v: v.discard(2), lambda v: 0.3 * len(v)),
    "deque": (lambda: collections.deque([0.5, 0.9]), lambda v: v.rotate(), lambda v: v.rotate(), lambda v: v[0]),
    "namespace": (
        lambda: types.SimpleNamespace(slope=0.5),
        lambda v: setattr(v, "slope", 0.9),
        lambda v: setattr(v, "slope", 0.5),
        lambda v: v.slope,
    ),
    "array": (lambda: np.array([0.5]), lambda v: v.fill(0.9), lambda v: v.fill(0.5), lambda v: float(v[0])),
    "array within": (
        lambda: {"a": np.arange(4.0)},
        lambda v: v["a"].__setitem__(0, 0.9),
        lambda v: v["a"].__setitem__(0, 0.0),
        lambda v: float(v["a"][0]),
    ),
    "default dict": (
        lambda: collections.defaultdict(lambda: 0.5),
        lambda v: setattr(v, "default_factory", lambda: 0.9),
        lambda v: setattr(v, "default_factory", lambda: 0.5),
        lambda v: v.default_factory(),
    ),
    "tuple with a list": (
        lambda: (1, [0.5]),
        lambda v: v[1].__setitem__(0, 0.9),
        lambda v: v[1].__setitem__(0, 0.5),
        lambda v: v[1][0],
    ),
    "class of an object": (
        lambda: made(Own, 0.5),
        lambda v: setattr(v, "__class__", Other),
        lambda v: setattr(v, "__class__", Own),
        lambda v: v(1.0),
    ),
    "method on an object": (
        lambda: made(Own, 0.5),
        lambda v: setattr(v, "method", lambda x: 0.9),
        lambda v: delattr(v, "method"),
        lambda v: v.method(1.0),
    ),
    "partial": (
        lambda: functools.partial(scaled, by=0.5),
        lambda v: v.keywords.update(by=0.9),
        lambda v: v.keywords.update(by=0.5),
        lambda v: v(1.0),
    ),
    "context variable": (
        lambda: ContextVar("b", default=0.5),
        lambda v: v.set(0.9),
        lambda v: v.set(0.5),
        lambda v: v.get(),
    ),
    "function's attribute": (
        with_attribute,
        lambda v: setattr(v, "slope", 0.9),
        lambda v: setattr(v, "slope", 0.5),
        lambda v: v.slope,
    ),
    "function's code": (
        with_attribute,
        lambda v: setattr(v, "__code__", (lambda: 0.9).__code__),
        lambda v: setattr(v, "__code__", (lambda: 0.5).__code__),
        lambda v: v(),
    ),
    "cache": (
        cached,
        lambda v: (v.settings.update(a=0.9), v.cache_clear()),
        lambda v: (v.settings.update(a=0.5), v.cache_clear()),
        lambda v: v(),
    ),
    "thread's": (threaded, lambda v: setattr(v, "slope", 0.9), lambda v: setattr(v, "slope", 0.5), lambda v: v.slope),
    "logger": (
        lambda: logging.getLogger("kinds"),
        lambda v: v.setLevel(logging.DEBUG),
        lambda v: v.setLevel(logging.WARNING),
        lambda v: 0.9 if v.isEnabledFor(logging.DEBUG) else 0.5,
    ),
    "decimal context": (
        lambda: decimal.Context(prec=3),
        lambda v: setattr(v, "prec", 1),
        lambda v: setattr(v, "prec", 3),
        lambda v: float(v.divide(decimal.Decimal(2), decimal.Decimal(3))),
    ),
    "weak values": (
        weak_values,
        lambda v: v.update(a=KEPT[1]),
        lambda v: v.update(a=KEPT[0]),
        lambda v: v["a"].slope,
    ),
}
