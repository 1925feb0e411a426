"""What a model reads that no attribute shows, and what torch sets no guard for: right, or refused with the line."""

from __future__ import annotations

import collections
import copy
import hashlib
import io
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reroll
from recorded_networks import agree
from reroll.backends.front.python_state.state import State
from reroll.backends.front.python_state.state_cache import Reach
from reroll.errors import RerollWarning, UnsupportedError

pytestmark = [pytest.mark.usefixtures("double_precision")]

DRAWN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "random": (lambda: random.Random(3), lambda held: held.random()),
    "choice": (lambda: random.Random(3), lambda held: float(held.choice([1, 2, 3]))),
    "numpy": (lambda: np.random.default_rng(3), lambda held: held.normal()),
    "legacy": (lambda: np.random.RandomState(3), lambda held: held.rand()),  # people hold these
    "bits": (lambda: np.random.PCG64(3), lambda held: held.random_raw() / 2**64),
    "torch": (lambda: torch.Generator().manual_seed(3), lambda held: torch.rand((), generator=held).item()),
    "text": (lambda: io.StringIO("1\n2\n3\n4\n" * 9), lambda held: float(held.readline())),
    "bytes": (lambda: io.BytesIO(bytes([1, 2, 3, 4] * 9)), lambda held: held.read(1)[0]),
}


def nothing(_: Any) -> float:
    return 1.0


class Gained(nn.Module):
    """A recurrence whose outputs are multiplied by what it reads."""

    def __init__(self, read: Callable[[Gained], Any], held: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.read, self.held = nn.RNNCell(4, 5), read, held

    def rolled(self, x_TBI: Tensor) -> Tensor:
        h, rows = x_TBI.new_zeros(3, 5), []
        for t in range(x_TBI.shape[0]):
            h = self.cell(x_TBI[t], h)
            rows.append(h)
        return torch.stack(rows)

    def forward(self, x_TBI: Tensor) -> Any:
        return self.rolled(x_TBI) * self.read(self)


def compiled(model: nn.Module, door: str) -> Any:
    if door == "any":
        return reroll.compile(model, lowering="eager")
    torch._dynamo.reset()
    return torch.compile(model, backend="reroll", options={"lowering": "eager"})


@pytest.mark.parametrize("kind", DRAWN)
def test_what_an_object_gives_next_is_put_back(kind: str) -> None:
    make, read = DRAWN[kind]
    model = Gained(read, make())
    state = State.of(model, parameters=False)
    assert state.moved_on() is None
    drawn = [read(model.held) for _ in range(3)]
    assert state.moved_on() == type(model.held).__name__
    state.restore()
    assert state.moved_on() is None
    assert [read(model.held) for _ in range(3)] == drawn


HELD: Any = None


def gain_of_global(model: Gained) -> Any:
    read: Callable[[Any], Any] = model.held
    return read(HELD)


@pytest.mark.parametrize("kind", [each for each in DRAWN if each != "random"])  # which is refused
@pytest.mark.filterwarnings("ignore")
def test_what_a_global_gives_next_is_given_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without attributes were not reached by their names."""
    make, read = DRAWN[kind]
    found = list[Any]()
    for compiles in (False, True):
        monkeypatch.setattr(f"{__name__}.HELD", make())
        model, x = Gained(gain_of_global, read), torch.randn(9, 3, 4, generator=torch.Generator().manual_seed(1))
        run = compiled(model, "any") if compiles else model
        found.append([*(run(x).detach() for _ in range(2)), read(HELD)])
    torch.testing.assert_close(*found)


def test_a_digest_that_goes_on_is_seen() -> None:
    model = Gained(nothing, hashlib.md5())
    state = State.of(model, parameters=False)
    model.held.update(b"more")
    assert state.moved_on() is not None


def gain_of_numpy(model: Gained) -> float:
    return float(model.held.integers(1, 3))


def gain_of_choice(model: Gained) -> float:
    return float(model.held.choice([1, 2]))


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    ("read", "make"), [(gain_of_numpy, np.random.default_rng), (gain_of_choice, random.Random)], ids=["numpy", "random"]
)
def test_a_generator_that_a_model_draws_from_goes_on_as_without_reroll(read: Any, make: Any, seed: int) -> None:
    net, twin = (Gained(read, make(seed)) for _ in range(2))
    run = compiled(twin, "any")
    for steps in (12, 20, 12, 12):
        agree(net, twin, run, torch.randn(steps, 3, 4), recorded=False)
    assert read(net) == read(twin)


def gain_of_python(model: Gained) -> Any:
    return model.held.random()


@pytest.mark.parametrize("door", ["any", "backend"])
def test_a_generator_of_pythons_is_refused(door: str) -> None:
    with pytest.raises(UnsupportedError, match=r"a random\.Random of its own.*Draw before the call"):
        compiled(Gained(gain_of_python, random.Random(3)), door)(torch.randn(12, 3, 4))


class Deque(Gained):
    """The mean of the last states of three calls is added."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        y = self.rolled(x_TBI)
        self.held.append(y[-1].detach())
        return y + torch.stack(list(self.held)).mean(0)


class Cut(Gained):
    """The same by a list: the remedy."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        y = self.rolled(x_TBI)
        self.held = [*self.held, y[-1].detach()][-3:]
        return y + torch.stack(self.held).mean(0)


@pytest.mark.parametrize("door", ["any", "backend"])
def test_a_deque_that_forgets_is_refused_and_a_list_that_is_cut_is_right(door: str) -> None:
    x_TBI = torch.randn(9, 3, 4)
    with pytest.raises(UnsupportedError, match=r"deque with maxlen \(self.held\).*\[-n:\]"):
        compiled(Deque(nothing, collections.deque(maxlen=3)), door)(x_TBI)
    plain, twin = Deque(nothing, collections.deque(maxlen=3)), Cut(nothing, [])
    run = compiled(twin, door)
    for _ in range(5):
        torch.testing.assert_close(run(x_TBI), plain(x_TBI), rtol=0, atol=1e-12)


def gain_of_environment(model: Gained) -> float:
    return float(os.environ.get("REROLL_TEST_GAIN", "1"))


def test_the_environment_is_read_anew_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x_TBI = Gained(gain_of_environment), torch.randn(9, 3, 4)
    run, backend = compiled(model, "any"), compiled(model, "backend")
    monkeypatch.delenv("REROLL_TEST_GAIN", raising=False)
    torch.testing.assert_close(backend(x_TBI), model(x_TBI), rtol=0, atol=1e-12)
    torch.testing.assert_close(run(x_TBI), model(x_TBI), rtol=0, atol=1e-12)
    monkeypatch.setenv("REROLL_TEST_GAIN", "2")
    with pytest.raises(UnsupportedError, match="REROLL_TEST_GAIN changed since"):
        backend(x_TBI)
    for gain in ("2", "3", "2"):
        monkeypatch.setenv("REROLL_TEST_GAIN", gain)
        torch.testing.assert_close(run(x_TBI), model(x_TBI), rtol=0, atol=1e-12)


def gain_of_first(model: Gained) -> float:
    return float(next(iter(model.held.values())))


def test_entries_that_are_moved_are_read_anew_or_refused() -> None:
    model, x_TBI = Gained(gain_of_first, collections.OrderedDict(one=1.0, two=2.0)), torch.randn(9, 3, 4)
    run, backend = compiled(model, "any"), compiled(model, "backend")
    torch.testing.assert_close(backend(x_TBI), model(x_TBI), rtol=0, atol=1e-12)
    model.held["one"] = model.held.pop("one")
    for compiled_model in (backend, run):
        torch.testing.assert_close(compiled_model(x_TBI), model(x_TBI), rtol=0, atol=1e-12)
    model.held.move_to_end("two")
    torch.testing.assert_close(run(x_TBI), model(x_TBI), rtol=0, atol=1e-12)
    with pytest.raises(UnsupportedError, match=r"held\.pop\(key\)"):
        backend(x_TBI)


def gain_within(model: Gained) -> float:
    gain = model.held
    while isinstance(gain, (tuple, list)):
        gain = gain[0]
    return float(gain)


@pytest.mark.parametrize("held", [([1.0], 2), ((5, [7])[::-1], "text"), ([(1.0,), 2],)], ids=str)
def test_a_list_in_a_tuple_of_constants_is_read_anew_or_refused(held: tuple[Any, ...]) -> None:
    """Dynamo's guard compares the tuple with itself."""
    model, x_TBI = Gained(gain_within, copy.deepcopy(held)), torch.randn(9, 3, 4)
    run, backend = compiled(model, "any"), compiled(model, "backend")
    torch.testing.assert_close(backend(x_TBI), model(x_TBI), rtol=0, atol=1e-12)
    torch.testing.assert_close(run(x_TBI), model(x_TBI), rtol=0, atol=1e-12)
    inner = model.held[0] if isinstance(model.held[0], list) else model.held[0][0]
    inner[0] = 3.0 if isinstance(inner[0], (int, float)) else (3.0,)
    torch.testing.assert_close(run(x_TBI), model(x_TBI), rtol=0, atol=1e-12)
    with pytest.raises(UnsupportedError, match=r"a tuple with a list in it .*Hold a list"):
        backend(x_TBI)
    model.held = [*model.held]
    torch.testing.assert_close(backend(x_TBI), model(x_TBI), rtol=0, atol=1e-12)


def gain_of_chain(model: Gained) -> float:
    return float(model.held["gain"])


def test_numbers_that_dynamo_sets_no_guard_for_are_read_anew() -> None:
    model, x_TBI = Gained(gain_of_chain, collections.ChainMap({}, {"gain": 1.0})), torch.randn(9, 3, 4)
    run = compiled(model, "any")
    for gain in (1.0, 2.0, 3.0, 1.0, 3.0):
        model.held["gain"] = gain
        torch.testing.assert_close(run(x_TBI), model(x_TBI), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_bytes_behind_a_view_belong_to_a_record() -> None:
    model, x_TBI = Gained(lambda model: float(model.held[0]), memoryview(bytearray([1, 2]))), torch.randn(9, 3, 4)
    run = compiled(model, "any")
    for gain in (1, 2, 1):
        model.held[0] = gain
        torch.testing.assert_close(run(x_TBI), model(x_TBI), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_the_seed_that_a_record_reads_belongs_to_it() -> None:
    model, x_TBI = Gained(lambda model: torch.initial_seed() % 3 + 1.0), torch.randn(9, 3, 4)
    run = compiled(model, "any")
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        torch.testing.assert_close(run(x_TBI), model(x_TBI), rtol=0, atol=1e-12)


held = 0


def test_an_attribute_is_no_global_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reach = Gained(nothing), Reach()
    before = reach.noted(model, (), {})[1]
    monkeypatch.setitem(globals(), "rolled", 3)  # ``self.rolled`` is a method
    monkeypatch.setitem(globals(), "held", 3)
    assert reach.noted(model, (), {})[1] == before == Reach().noted(model, (), {})[1]


level = 0


def gain_of_level(model: Gained) -> float:
    return 1.0 if level < 100 else 2.0


def test_a_model_that_is_looked_at_at_every_call_is_told_once_with_what_changed(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    run = compiled(Gained(gain_of_level), "any")
    told = list[str]()
    for call in range(7):
        monkeypatch.setitem(globals(), "level", call)
        run(torch.randn(9, 3, 4))
        told.append("".join(str(each.message) for each in recwarn.list if each.category is RerollWarning))
    assert not any(told[:3])
    assert "looked at anew in 3 calls in a row" in told[3]
    assert "level (2, then 3) was another one" in told[3]
    assert told[3:] == [told[3]] * 4


def test_other_lengths_are_no_reason_to_say_so(recwarn: pytest.WarningsRecorder) -> None:
    run = compiled(Gained(gain_of_level), "any")
    for steps in (9, 10, 11, 12, 13, 9, 10):
        run(torch.randn(steps, 3, 4))
    assert not [each for each in recwarn.list if each.category is RerollWarning]


@pytest.mark.parametrize("name", ["numpy", "legacy", "text", "bytes", "torch"])
def test_nobody_repeats_what_a_model_without_time_draws_and_no_proof_looks_at(name: str) -> None:
    make, read = DRAWN[name]
    plain, model = (Gained(lambda each: read(each.held), make()) for _ in range(2))
    run, x = reroll.compile(model, lowering="eager", proof="never"), torch.randn(12, 3, 4)
    for _ in range(4):
        torch.testing.assert_close(run(x), plain(x))
