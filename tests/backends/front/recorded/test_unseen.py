"""What a record of operations does not see by itself: it is found by its traces, and refused or recorded anew."""

from __future__ import annotations

import enum
import gc
import sys
import weakref
from array import array
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache, partialmethod
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import reroll
from recorded_networks import agree, read_by_dynamo, twins

EAGER: dict[str, Any] = {"lowering": "eager"}
pytestmark = pytest.mark.filterwarnings("ignore:The model asks")
D = torch.float64
SCALE = 0.5


def data(steps: int = 20) -> Tensor:
    """Sequences of 3 rows of 4 numbers."""
    return torch.randn(steps, 3, 4, dtype=D, requires_grad=True)


class Net(nn.Module):
    """A loop with a factor that comes from somewhere."""

    scale = 0.5

    def __init__(self, factor: Callable[[Any, Tensor], Any], each: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.factor, self.each = factor, each
        self.p = nn.Parameter(torch.linspace(-1, 1, 8, dtype=D))

    def gain(self, k: float = 0.5) -> float:
        """A default."""
        return k

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        h, b = torch.zeros(3, 4, dtype=D), torch.zeros(3, 4, dtype=D)
        k = self.factor(self, x)
        for t in range(x.shape[0]):
            if self.each is not None:
                self.each(b)
            h = torch.tanh(x[t] + k * h)
        return h + b


def real_part(_: Any, x: Tensor) -> Tensor:
    """An assignment to a part."""
    z = torch.zeros(4, dtype=torch.complex128)
    z.real = x[0, 0].detach()
    return z.abs()


def seeded(_: Any, x: Tensor) -> Tensor:
    """Always the same number."""
    torch.manual_seed(3)
    return torch.rand(4, dtype=D)


def forked(_: Any, x: Tensor) -> Tensor:
    """Numbers that leave the state as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.rand(4, dtype=D)


def memory(_: Any, x: Tensor) -> Tensor:
    """A constant whose memory is an input's."""
    c: Any = torch.zeros(4, dtype=D)
    c.set_(x[0, 0].detach())
    found: Tensor = c
    return found


UNTOLD: dict[str, Any] = {
    "nonzero": lambda _, x: torch.nonzero(x[0] > 0).shape[0] * 0.1,
    "mask": lambda _, x: x[0][x[0] > 0].size(0) * 0.1,
    "length": lambda _, x: len(x[0][x[0] > 0]) * 0.1,
    "unique": lambda _, x: torch.unique(x[0].floor()).numel() * 0.1,
    "where": lambda _, x: len(torch.where(x[0] > 0)[0]) * 0.1,
    "parameter": lambda net, _: net.p[net.p > 0].numel() * 0.1,
    "one hot": lambda _, x: nn.functional.one_hot((x[0, 0] > 0).long()).shape[1] * 0.1,
    "seed": seeded,
    "fork": forked,
    "real": real_part,
    "memory": memory,
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_values_decide_unseen_is_read_by_dynamo(name: str) -> None:
    read_by_dynamo(Net(UNTOLD[name]), data(), data(31), -data(), data())


@pytest.mark.parametrize("name", ["seed", "fork"])
@pytest.mark.parametrize("before", [3, 4])
def test_a_seed_that_a_model_sets_holds_whatever_was_set_before(name: str, before: int) -> None:
    net = Net(UNTOLD[name])
    run, found = reroll.compile(net, **EAGER), list[Any]()
    for seed in (before, 5, 3):
        x = data()
        for each in (run, net):
            torch.manual_seed(seed)
            found.append((each(x), torch.rand(2)))
        torch.testing.assert_close(*found[-2:])


def test_updates_that_torch_shows_nobody_are_read_by_dynamo() -> None:
    net = Net(lambda *_: 0.5, lambda b: b.set_(b + 1.0))  # type: ignore[call-overload]
    read_by_dynamo(net, data(), data(31), data())


def test_sizes_of_constants_are_no_sizes_of_values() -> None:
    net = Net(
        lambda *_: torch.nonzero(torch.eye(3)).shape[0] * 0.1 + torch.arange(5)[torch.arange(5) > 2].numel() * 0.1
    )
    reroll.check(reroll.compile(net, **EAGER), data(), strict=True, measure=False)


@pytest.mark.parametrize("where", ["global", "class", "default", "method"])
def test_numbers_outside_of_objects_may_change_between_calls(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (SCALE if where == "global" else self.scale)

    factors: dict[str, Any] = {"class": lambda net, _: net.scale}
    net = Own(factors.get(where, lambda net, _: net.gain()))
    run = reroll.compile(net, **EAGER)
    reroll.check(run, data(), strict=True, measure=False)
    if where == "global":
        monkeypatch.setitem(globals(), "SCALE", 0.9)
    elif where == "class":
        monkeypatch.setattr(Own, "scale", 0.9, raising=False)
    elif where == "default":
        monkeypatch.setattr(Net.gain, "__defaults__", (0.9,))
    else:
        monkeypatch.setattr(Own, "gain", lambda net: 0.1, raising=False)
    reroll.check(run, data(), strict=True, measure=False)


settings = ModuleType("settings")
exec(  # a module of the user's, whose functions read its own names
    "slope, depth = 0.5, 2\ndef factor(x):\n    return slope * deeper()\ndef deeper():\n    return 1.0 / depth",
    vars(settings),
)


class Config:
    """Settings as attributes of a class, in ways that a class has."""

    slope = 0.5

    @property
    def half(self) -> float:
        """A property that reads a global."""
        return SCALE / 2

    @staticmethod
    def whole() -> float:
        """A function that reads another."""
        return Config.slope

    @classmethod
    def twice(cls) -> float:
        """A method of the class."""
        return 2 * cls.slope


class Mode(enum.Enum):
    """Choices."""

    SLOW = 0.1
    FAST = 0.7


class Slots:
    """Attributes without a dict."""

    __slots__ = ("slope",)

    def __init__(self) -> None:
        self.slope = 0.5


class Meta(type):
    """A class of classes."""

    @property
    def slope(cls) -> float:
        """A property of classes."""
        return SCALE


class OfMeta(metaclass=Meta):
    """A class with a property."""


class Named(dict[str, float]):
    """A dict with attributes."""

    def by_name(self) -> float:
        """One of them."""
        return float(vars(self)["slope"])


class Row(tuple[float, ...]):
    """A tuple with a method."""

    __slots__ = ()
    slope = 0.5

    def first(self) -> float:
        """Reads an attribute of the class."""
        return self[0] * self.slope


@lru_cache
def cached(_: int) -> float:
    """Remembered until it is cleared."""
    return SCALE


def halved(_: Any, divisor: float) -> float:
    """What a partial method calls."""
    return 1 / divisor


def change_scale(patch: pytest.MonkeyPatch) -> None:
    """Another global, and nothing that remembers the old one."""
    patch.setitem(globals(), "SCALE", 0.9)
    cached.cache_clear()


QUEUE, ARRAY = deque([0.5, 0.9]), np.array([0.5])
CONFIG, MODE, PAIR, CHOICES, ACT = Config(), Mode.SLOW, (0.5, 0.1), frozenset({1, 2}), torch.tanh
WORDS, LAYERED, SEEN = ChainMap({}, {"slope": 0.5}), (Named(), Slots(), Row((1.0,))), MappingProxyType({"slope": 0.5})
WEAK, NUMBERS, CONTEXT = weakref.ref(CONFIG), array("d", [0.5]), ContextVar("slope", default=0.5)
USERS, WEIGHT = UserDict(slope=0.5), nn.Parameter(torch.ones(4, dtype=D))
OBJECTS, CONSTANT = np.array([{"slope": 0.5}], dtype=object), torch.full((4,), 0.5, dtype=D)


class Slope(Net):
    """Reads what is given by a property of its own."""

    class Inner:
        """Settings within a class."""

        slope = 0.5

    table = settings

    def __init__(self, factor: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(factor)
        self.kind, self.module, self.slots, self.weight = Config, settings, LAYERED[1], WEIGHT
        self.fc = nn.Linear(4, 4, dtype=D)

    half = partialmethod(halved, divisor=2.0)

    @property
    def slope(self) -> float:
        """A property of the model's."""
        return float(settings.slope)


def in_closure(held: Any) -> Callable[..., float]:
    """A module or class in a variable."""
    return lambda *_: float(held.slope)


def imported(*_: Any) -> float:
    """An import that runs with the model."""
    from reroll_tests_settings import slope  # type: ignore[import-not-found]  # put into sys.modules below

    return float(slope)


def by_default(*_: Any, held: Any = Config) -> float:
    """A class in a default."""
    return float(held.slope)


def scaled(*_: Any) -> float:
    """A function with attributes."""
    return 0.5 * float(vars(scaled)["by"])


sys.modules["reroll_tests_settings"] = settings
vars(scaled)["by"], vars(LAYERED[0])["slope"], vars(WEIGHT)["slope"], vars(CONFIG)["own"] = 1.0, 0.5, 0.5, 0.5


UNSEEN: dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], None]]] = {
    "module": (lambda *_: settings.slope, lambda patch: patch.setattr(settings, "slope", 0.9)),
    "function of a module": (lambda _, x: settings.factor(x), lambda patch: patch.setattr(settings, "slope", 0.9)),
    "behind that": (lambda _, x: settings.factor(x), lambda patch: patch.setattr(settings, "depth", 5)),
    "another": (lambda _, x: settings.factor(x), lambda patch: patch.setattr(settings, "deeper", lambda: 0.2)),
    "class": (lambda *_: Config.slope, lambda patch: patch.setattr(Config, "slope", 0.9)),
    "property": (lambda *_: CONFIG.half, lambda patch: patch.setitem(globals(), "SCALE", 0.9)),
    "static method": (lambda *_: Config.whole(), lambda patch: patch.setattr(Config, "slope", 0.9)),
    "method of a class": (lambda *_: Config.twice(), lambda patch: patch.setattr(Config, "slope", 0.9)),
    "choice": (lambda *_: MODE.value, lambda patch: patch.setitem(globals(), "MODE", Mode.FAST)),
    "tuple": (lambda *_: PAIR[0], lambda patch: patch.setitem(globals(), "PAIR", (0.9, 0.1))),
    "set": (lambda *_: len(CHOICES) / 4, lambda patch: patch.setitem(globals(), "CHOICES", frozenset({1, 2, 3}))),
    "operation": (lambda net, _: ACT(net.p[:4]), lambda patch: patch.setitem(globals(), "ACT", torch.sigmoid)),
    "deque": (lambda *_: QUEUE[0], lambda _: QUEUE.rotate(1)),
    "array": (lambda *_: float(ARRAY[0]), lambda _: ARRAY.fill(0.9)),
    "slots": (lambda net, _: net.slots.slope, lambda patch: patch.setattr(LAYERED[1], "slope", 0.9)),
    "slots named": (lambda *_: LAYERED[1].slope, lambda patch: patch.setattr(LAYERED[1], "slope", 0.9)),
    "module in an attribute": (lambda net, _: net.module.slope, lambda patch: patch.setattr(settings, "slope", 0.9)),
    "module in a class": (lambda net, _: net.table.slope, lambda patch: patch.setattr(settings, "slope", 0.9)),
    "module in a closure": (in_closure(settings), lambda patch: patch.setattr(settings, "slope", 0.9)),
    "module imported inside": (imported, lambda patch: patch.setattr(settings, "slope", 0.9)),
    "module by its name": (
        lambda *_: sys.modules["reroll_tests_settings"].slope,
        lambda patch: patch.setattr(settings, "slope", 0.9),
    ),
    "class in an attribute": (lambda net, _: net.kind.slope, lambda patch: patch.setattr(Config, "slope", 0.9)),
    "class in a class": (lambda net, _: net.Inner.slope, lambda patch: patch.setattr(Slope.Inner, "slope", 0.9)),
    "class in a closure": (in_closure(Config), lambda patch: patch.setattr(Config, "slope", 0.9)),
    "class in a default": (by_default, lambda patch: patch.setattr(Config, "slope", 0.9)),
    "attribute of a function": (scaled, lambda patch: patch.setattr(scaled, "by", 0.2)),
    "attribute of a parameter": (
        lambda net, _: net.weight.slope,
        lambda patch: patch.setattr(WEIGHT, "slope", 0.9),
    ),
    "attribute of a dict": (lambda *_: LAYERED[0].by_name(), lambda patch: patch.setattr(LAYERED[0], "slope", 0.9)),
    "class of a tuple": (lambda *_: LAYERED[2].first(), lambda patch: patch.setattr(Row, "slope", 0.9)),
    "by a text": (lambda *_: getattr(settings, "slope", 0.1), lambda patch: patch.setattr(settings, "slope", 0.9)),
    "among all": (lambda *_: globals()["SCALE"], lambda patch: patch.setitem(globals(), "SCALE", 0.9)),
    "in a text": (lambda *_: eval("SCALE"), lambda patch: patch.setitem(globals(), "SCALE", 0.9)),
    "layers": (lambda *_: WORDS["slope"], lambda patch: patch.setitem(WORDS.maps[1], "slope", 0.9)),
    "a user's dict": (lambda *_: USERS["slope"], lambda patch: patch.setitem(USERS, "slope", 0.9)),
    "read only": (lambda *_: SEEN["slope"], lambda patch: patch.setitem(gc.get_referents(SEEN)[0], "slope", 0.9)),
    "weak reference": (lambda *_: vars(WEAK())["own"], lambda patch: patch.setitem(vars(CONFIG), "own", 0.9)),
    "numbers": (lambda *_: NUMBERS[0], lambda _: NUMBERS.__setitem__(0, 0.9)),
    "objects": (lambda *_: OBJECTS[0]["slope"], lambda patch: patch.setitem(OBJECTS[0], "slope", 0.9)),
    "remembered": (lambda *_: cached(1), change_scale),
    "partial method": (
        lambda net, _: net.half(),
        lambda patch: patch.setitem(vars(Slope)["half"].keywords, "divisor", 1.5),
    ),
    "property of a class": (lambda *_: OfMeta.slope, lambda patch: patch.setitem(globals(), "SCALE", 0.9)),
    "torch's function": (
        lambda net, _: torch.sin(net.p[:4]),
        lambda patch: patch.setattr(torch, "sin", torch.cos),
    ),
    "torch's layer": (
        lambda net, x: net.fc(x[0]),
        lambda patch: patch.setattr(nn.Linear, "forward", lambda fc, x: x @ fc.weight),
    ),
    "constant": (lambda *_: CONSTANT, lambda patch: patch.setitem(globals(), "CONSTANT", torch.ones(4, dtype=D))),
    "constant in place": (lambda *_: CONSTANT, lambda _: torch._foreach_mul_([CONSTANT], 1.5)),
    "property of the model": (lambda net, _: net.slope, lambda patch: patch.setattr(settings, "slope", 0.9)),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_functions_name_may_change_between_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factor, change = UNSEEN[name]
    run = reroll.compile(Slope(factor), **EAGER)
    reroll.check(run, data(), strict=True, measure=False)
    change(monkeypatch)
    reroll.check(run, data(), strict=True, measure=False)


def test_a_context_variable_may_change_between_calls() -> None:
    run = reroll.compile(Slope(lambda net, x: net.fc(x[0]) * CONTEXT.get()), **EAGER)
    reroll.check(run, data(), strict=True, measure=False)
    token = CONTEXT.set(0.9)
    reroll.check(run, data(), strict=True, measure=False)
    CONTEXT.reset(token)


@pytest.fixture
def halving() -> Iterator[Callable[[], Any]]:
    """Adds a hook of all modules, which halves what each gives: it would do so for modules that reroll makes, too."""
    hooks: list[Any] = []

    def add() -> Any:
        hooks.append(nn.modules.module.register_module_forward_hook(lambda module, _, y: y * 0.5))
        return hooks[-1]

    yield add
    for each in hooks:
        each.remove()


@pytest.mark.parametrize("prints", [False, True], ids=["recorded", "read by Dynamo"])
def test_hooks_of_all_modules_may_change_between_calls(prints: bool, halving: Callable[[], Any]) -> None:
    """Modules of reroll's own are called without them: some give tuples, and what a model gives was halved twice."""
    net = Slope(lambda net, x: net.fc(x[0]) * (CONTEXT.get() if prints else 0.5))
    run = reroll.compile(net, **EAGER)
    for count in (0, 1, 2, 1, 0):
        hooks = [halving() for _ in range(count)]
        reroll.check(run, data(), strict=True, measure=False)
        x = data()
        torch.testing.assert_close(run(x), net(x))
        for each in hooks:
            each.remove()
    assert run.reroll_caller.is_read is prints


@pytest.mark.parametrize("door", ["recorded", "read by Dynamo", "backend"])
def test_torchs_own_hooks_of_all_modules_only_watch(door: str) -> None:
    net = Slope(lambda net, x: net.fc(x[0]) * (CONTEXT.get() if door == "read by Dynamo" else 0.5))
    backend: Any = torch.compile(net.forward, backend="reroll", options=EAGER)
    run, x = backend if door == "backend" else reroll.compile(net, **EAGER), data()
    for _ in range(2):
        torch.testing.assert_close(run(x), net(x))
        for counting in (ModuleTracker(), FlopCounterMode(display=False)):
            with counting:
                torch.testing.assert_close(run(x), net(x))


def test_the_backend_refuses_hooks_of_all_modules_that_it_does_not_see(halving: Callable[[], Any]) -> None:
    net = Slope(lambda net, x: net.fc(x[0]))
    run = torch.compile(net.forward, backend="reroll", options=EAGER)
    x = data()
    torch.testing.assert_close(run(x), net(x))
    halving()
    with pytest.raises(reroll.UnsupportedError, match=r"A hook of all modules.*torch\.compiler\.reset\(\)"):
        run(x)
    torch.compiler.reset()
    torch.testing.assert_close(run(x), net.forward(x))


class Leaving(Net):
    """Leaves something in an object with slots, and in a function."""

    def __init__(self, where: str) -> None:
        super().__init__(lambda *_: 0.5)
        self.slots, self.where = Slots(), where

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.where == "slots":
            self.slots.slope = y.detach()  # type: ignore[assignment]
        elif self.where == "function":
            halved.last = y.detach()  # type: ignore[attr-defined]
        elif self.where == "attributes":
            scaled.last = y.detach()  # type: ignore[attr-defined]
        else:
            self.p.last = y.detach()  # type: ignore[attr-defined]
        return y


@pytest.mark.parametrize(
    ("where", "left"), [("slots", lambda net: net.slots.slope), ("attributes", lambda _: vars(scaled)["last"])]
)
def test_what_is_left_in_slots_and_attributes_is_that_of_each_call(where: str, left: Callable[[Any], Tensor]) -> None:
    net = Leaving(where)
    run = reroll.compile(net, **EAGER)
    for _ in range(3):
        assert torch.equal(run(data()).detach(), left(net))


@pytest.mark.parametrize("where", ["function", "parameter"])
def test_first_attributes_of_a_function_or_tensor_are_those_of_each_call(where: str) -> None:
    net = Leaving(where)
    run, owner = reroll.compile(net, **EAGER), halved if where == "function" else net.p
    for steps in (20, 31, 20):
        assert torch.equal(run(data(steps)).detach(), vars(owner).pop("last"))


CALLS, LAST = 0, torch.zeros(1)


def test_a_global_number_is_counted_once_a_call_where_dynamo_reads_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(x: Tensor) -> Tensor:
        global CALLS  # noqa: PLW0603  # it is what is counted
        h = torch.zeros(3, 4, dtype=D)
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + 0.5 * h)
        CALLS += 1
        return h

    monkeypatch.setitem(globals(), "CALLS", 0)
    run = reroll.compile(forward, **EAGER)
    for calls in range(3):
        assert calls == CALLS
        run(data())
    assert CALLS == 3


class Telling(Net):
    """Leaves something outside of itself."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        global CALLS, LAST  # noqa: PLW0603  # it is what is refused
        assert self.each is not None
        self.each(x)
        y = super().forward(x)
        if self.scale == 1:
            CALLS += 1
        elif self.scale == 2:
            LAST = y.detach()
        elif self.scale == 3:
            Telling.calls += 1
        else:
            type(self).more = y.detach()  # type: ignore[attr-defined]
        return y


@pytest.mark.parametrize(("scale", "name"), [*enumerate(["more", "CALLS", "LAST", "calls"])])
def test_what_is_assigned_outside_of_objects_is_assigned_once_a_call(
    scale: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "CALLS", 0)
    monkeypatch.setattr(Telling, "calls", 0)
    net = Telling(lambda *_: 0.5, lambda _: None)
    net.scale = scale
    run = reroll.compile(net, **EAGER)
    for call, steps in enumerate((20, 31, 20)):
        y = run(data(steps)).detach()
        left = globals()[name] if name.isupper() else getattr(Telling, name)
        assert torch.equal(left, y) if isinstance(left, Tensor) else left == call + 1


class Sur:
    """A derivative."""

    def __init__(self, w: float) -> None:
        self.w = w

    def __call__(self, v: Tensor) -> Tensor:
        return torch.exp(-v.abs() * self.w)


class Deep(Sur):
    """The same, of what a list in it holds."""

    def __call__(self, v: Tensor) -> Tensor:
        held: Any = self.w
        return torch.exp(-v.abs() * held[0]["w"])


class Slotted:
    """The same without a dict of attributes."""

    __slots__ = ("w",)

    def __init__(self, w: float) -> None:
        self.w = w

    def __call__(self, v: Tensor) -> Tensor:
        return torch.exp(-v.abs() * self.w)


class Spike(torch.autograd.Function):
    """A step, with a derivative that is given."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, sur: Any) -> Tensor:
        ctx.save_for_backward(v)
        ctx.sur = sur
        return (v > 0.1).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.sur(ctx.saved_tensors[0]), None


class Spiking(nn.Module):
    """A neuron with a derivative."""

    def __init__(self, sur: Any) -> None:
        super().__init__()
        self.fc, self.sur = nn.Linear(4, 4, dtype=D), sur

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        h, rows = torch.zeros(3, 4, dtype=D), []
        for t in range(x.shape[0]):
            h = 0.9 * h + self.fc(x[t])
            spikes: Tensor = Spike.apply(h, self.sur)  # type: ignore[no-untyped-call]
            h = h - spikes
            rows.append(spikes)
        return torch.stack(rows)


def closure(w: float) -> tuple[Any, Any]:
    """A derivative, and what changes it."""

    def derivative(v: Tensor) -> Tensor:
        return torch.exp(-v.abs() * w)

    def change(value: float) -> None:
        nonlocal w
        w = value

    return derivative, change


def test_an_equal_object_in_the_place_of_another_is_the_one_that_is_read() -> None:
    old = Sur(1.0)
    net = Spiking(old)
    run = reroll.compile(net, **EAGER)
    reroll.check(run, data(), strict=True, measure=False)
    net.sur = Sur(1.0)
    old.w = 5.0
    reroll.check(run, data(), strict=True, measure=False)
    net.sur.w = 3.0
    reroll.check(run, data(), strict=True, measure=False)


def test_a_variable_of_a_function_that_changes_is_seen() -> None:
    (one, change), (other, _) = closure(1.0), closure(1.0)
    net = Spiking(one)
    run = reroll.compile(net, **EAGER)
    reroll.check(run, data(), strict=True, measure=False)
    change(3.0)
    reroll.check(run, data(), strict=True, measure=False)
    net.sur = other
    change(5.0)
    reroll.check(run, data(), strict=True, measure=False)


def tensor_within(w: Tensor) -> Any:
    """A function over a tensor."""
    return lambda v: torch.exp(-v.abs() * w)


@pytest.mark.parametrize(
    "sur",
    [
        Slotted(1.0),
        Sur(torch.ones((), dtype=D)),  # type: ignore[arg-type]
        Deep([{"w": torch.ones((), dtype=D)}]),  # type: ignore[arg-type]
        tensor_within(torch.ones((), dtype=D)),
    ],
    ids=["slots", "a tensor", "a tensor within", "a closure"],
)
def test_objects_that_cannot_be_compared_are_read_by_dynamo(sur: Any) -> None:
    net, twin, run = twins(Spiking(sur))
    for steps in (20, 31, 20):
        agree(net, twin, run, data(steps), recorded=False)
