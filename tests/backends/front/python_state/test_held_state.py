"""What a model holds is looked at at every call: without copies, and put back only where a look changed it."""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import sys
import threading
import tracemalloc
import weakref
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.front.python_state.state import State
from reroll.backends.front.python_state.state_cache import Reach
from reroll.errors import UnsupportedError


class Holder(nn.Module):
    """Holds a data set, as training scripts do."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.samples = np.zeros((samples, 1000), dtype=np.float64)
        self.names, self.seen = ["a"] * samples, deque([1, 2])
        self.index: dict[str, Any] = {"first": 0}

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(3, 4)
        for t in range(x.shape[0]):
            h = torch.tanh(self.cell(x[t]) + h)
        return h


def key(model: nn.Module) -> Any:
    return Reach().noted(model, (), {})[1]


class Monitor(threading.Thread):
    """Notes when it last woke up, as the one of progress bars does."""

    woken = 0.0


def test_what_a_thread_of_a_library_notes_is_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("bars")
    library.__file__ = "/somewhere/site-packages/bars.py"
    monkeypatch.setitem(sys.modules, "bars", library)
    kind: Any = type("Installed", (Monitor,), {"__module__": "bars"})
    model, monitor = Holder(1), kind()
    model.index["monitor"] = monitor
    before = key(model)
    monitor.woken = 1.0
    assert key(model) == before
    model.index["first"] = 1
    assert key(model) != before


def test_a_thread_of_the_users_is_looked_at() -> None:
    model, monitor = Holder(1), Monitor()
    model.index["monitor"] = monitor
    before = key(model)
    monitor.woken = 1.0
    assert key(model) != before


def test_a_data_set_is_not_copied_by_a_call() -> None:
    model = Holder(2000)  # 16 MB
    compiled, x = reroll.compile(model, lowering="eager"), torch.randn(20, 3, 4)
    for _ in range(2):  # the second call looks at the model again
        compiled(x).sum().backward()
    tracemalloc.start()
    compiled(x).sum().backward()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < model.samples.nbytes / 4
    assert sys.getsizeof(key(model)[1].value[3][0][-1]) < 100_000


def test_changes_of_what_is_held_are_seen() -> None:
    model = Holder(2000)
    before = key(model)
    assert key(model) == before
    model.samples[...] = 1
    changed = key(model)
    assert changed != before
    model.samples = model.samples.copy()
    assert key(model) != changed
    model.samples = np.zeros((4, 1000))
    small = key(model)
    model.samples[3, 999] = 1
    assert key(model) != small


class Guarded(list[Any]):
    """A list that nobody may write to."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("written")


def test_only_what_changed_is_put_back() -> None:
    model = Holder(3)
    model.names = Guarded(["a", "b"])
    model.samples.flags.writeable = False
    state = State.of(model, parameters=False)
    model.index["second"], model.calls = 1, 3  # type: ignore[assignment]
    model.seen.append(3)
    state.restore()
    assert model.index == {"first": 0}
    assert model.seen == deque([1, 2])
    assert not hasattr(model, "calls")
    model.samples.flags.writeable = True
    state = State.of(model, parameters=False)
    model.samples[1, 1] = 5
    state.restore()
    assert not model.samples.any()


class Slopes:
    """Settings of a library: an object that its functions name."""

    shared: ClassVar[list[Any]] = [1]

    def __init__(self) -> None:
        self.value, self.table = 2.0, {"a": [1, 2]}


SLOPES = Slopes()


def by_slopes(x: Tensor, *, sharp: bool = True) -> Tensor:
    return x * SLOPES.value if sharp else x


class Library(nn.Module):
    """Its state is in what its code names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = [nn.Linear(2, 2)]

    def forward(self, x: Tensor) -> Tensor:
        return by_slopes(x)


def changed(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value, raising=False)


@pytest.mark.parametrize(
    "change",
    [
        changed(SLOPES, "value", 3.0),
        changed(SLOPES, "more", 1),
        lambda patch: patch.setitem(SLOPES.table, "b", []),
        lambda patch: patch.setitem(SLOPES.table, "a", [5, 2]),
        changed(Slopes, "shared", [2]),
        changed(Slopes, "__init__", lambda self: None),
        lambda patch: patch.setitem(globals(), "SLOPES", Slopes),
        lambda patch: patch.setitem(globals(), "by_slopes", lambda x: x),
        changed(by_slopes, "__code__", (lambda x, *, sharp=True: x).__code__),
        lambda patch: patch.setitem(by_slopes.__kwdefaults__, "sharp", False),
        changed(by_slopes, "__kwdefaults__", {"sharp": False}),
        changed(Library, "forward", lambda self, x: x),
    ],
)
def test_changes_of_what_code_names_are_seen_though_it_is_walked_once(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reach, walks = Library(), Reach(), list[State]()
    walk = State.named

    def counted(state: State, *seen: Any) -> State:
        walks.append(state)
        return walk(state, *seen)

    monkeypatch.setattr(State, "named", counted)
    before = reach.noted(model, (), {})[1]
    assert reach.noted(model, (), {})[1] == before
    assert len(walks) == 1
    with monkeypatch.context() as patch:
        change(patch)
        assert reach.noted(model, (), {})[1] != before
    assert reach.noted(model, (), {})[1] == before


@pytest.mark.parametrize("shared", [SLOPES.table["a"], Slopes.shared])
def test_items_that_change_in_what_code_names_are_seen(shared: list[Any]) -> None:
    model, reach = Library(), Reach()
    before = reach.noted(model, (), {})[1]
    shared.append(4)
    longer = reach.noted(model, (), {})[1]
    shared[-1] = 5
    other = reach.noted(model, (), {})[1]
    shared.pop()
    assert before == reach.noted(model, (), {})[1] != longer != other != before


def test_what_code_names_and_the_model_holds_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number among the model's own objects belongs to the key, and it moves with them."""
    model, reach = Library(), Reach()
    monkeypatch.setattr(Slopes, "shared", model.inner)
    before = reach.noted(model, (), {})[1]
    model.inner = [model.inner[0]]
    apart = reach.noted(model, (), {})[1]
    assert apart != before
    model.more = [model.inner]  # type: ignore[assignment]
    monkeypatch.setattr(Slopes, "shared", model.more)
    moved = reach.noted(model, (), {})[1]
    assert moved not in (before, apart)
    assert Reach().noted(model, (), {})[1] == moved


def test_no_tensor_but_small_constants_is_kept_from_call_to_call() -> None:
    reach, value = Reach(), torch.zeros(300)
    SLOPES.value = value  # type: ignore[assignment]
    gone = weakref.ref(value)

    def run(x: Tensor, held: Tensor = value) -> Tensor:
        return by_slopes(x) + held

    state = reach.noted(run, (torch.zeros(300),), {})[0]
    assert any(each is value for each, *_ in state.tensors)
    SLOPES.value = 2.0
    del run, value, state
    gc.collect()
    assert gone() is None


def test_what_classes_of_pythons_keep_for_themselves_is_not_the_models() -> None:
    """A lock of multiprocessing's, as progress bars hold one, names its files by an iterator of its class."""
    model = Holder(1)
    settings = argparse.Namespace(slope=1.0)
    model.index |= {"lock": multiprocessing.Lock(), "settings": settings}
    before = key(model)
    assert key(model) == before
    settings.slope = 2.0
    assert key(model) != before


def test_an_iterator_that_a_model_holds_is_refused() -> None:
    model = Holder(1)
    model.index["counter"] = itertools.count()
    with pytest.raises(UnsupportedError, match="keeps an iterator"):
        key(model)


_PARTS_OF: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], ...]] = weakref.WeakKeyDictionary()


class Remembering(nn.Module):
    """Remembers its parts in a weak dictionary when it is first called, as SpikingJelly's ``reset_net`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x_TBI: Tensor) -> Tensor:
        parts = _PARTS_OF.get(self)
        if parts is None:
            parts = _PARTS_OF[self] = tuple(weakref.ref(each) for each in self.children())
        cell, h_BN = parts[0](), x_TBI.new_zeros(x_TBI.shape[1], 4)
        assert cell is not None
        for t in range(x_TBI.shape[0]):
            h_BN = cell(x_TBI[t], h_BN)
        return h_BN


@pytest.mark.filterwarnings("ignore:Dynamo cannot read")
def test_what_is_remembered_weakly_is_no_change() -> None:
    run = reroll.compile(Remembering(), lowering="eager")
    for steps in (20, 33):
        reroll.check(run, torch.randn(steps, 2, 3), strict=True, measure=False, tolerance=1e-5)
    assert [loop.recurrence.steps for loop in reroll.explain(run, torch.randn(20, 2, 3)).loops] == [20]


MAKING = {
    "made first": ("def f():\n global A\n A = 1\n return A", ["A"]),
    "made within": ("def f():\n def g():\n  global A\n  A = 1\n g()\n return A", ["A"]),
    "there": ("A = 0\ndef f():\n global A\n A = 1", []),
    "tried": ("def f():\n global A\n try:\n  A\n except Exception:\n  A = 1", []),
    "tried within": ("def f():\n global A\n def g():\n  try:\n   A\n  except Exception:\n   pass\n A = 1\n g()", []),
    "NameError elsewhere": (
        "def f():\n global A\n try:\n  g()\n except NameError:\n  A = 1\ndef g():\n return A",
        [],
    ),
    "an attribute": ("def f(m):\n global A\n A = 1\n return m.A", []),
    "a text": ("def f(names):\n global A\n A = 1\n return 'A' in names", []),
    "by name": ("def f():\n global A\n A = 1\n return globals()", []),
}
