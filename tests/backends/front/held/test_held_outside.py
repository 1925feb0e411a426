"""What a model takes from where nothing can be put back (iterators, files, the clock), and parameters it changes."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.front.beside import UnsteadyError
from reroll.backends.front.held.outside import TakenError
from reroll.errors import UnsupportedError

COUNT: Iterator[Any] = itertools.count(1)
FILE = Path("nowhere")
LOG = logging.getLogger(__name__)
GIVEN: tuple[dict[str, Any], ...] = ({}, {"time_dim": 0})


class Scaled(nn.Module):
    """A loop whose states are scaled by what ``scale`` says at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def scale(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        scale, h = self.scale(), x.new_zeros(x.shape[1], 3)
        for x_t in x:
            h = torch.tanh(self.linear(x_t) + scale * self.frozen(h))
        return h


class Counted(Scaled):
    def scale(self) -> float:
        return 0.1 * float(next(COUNT))


class Zipped(Scaled):
    def scale(self) -> float:
        return sum(0.1 * float(each) for each, _ in zip(COUNT, range(2), strict=False))


class InClass(Scaled):
    numbers = iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])

    def scale(self) -> float:
        return next(type(self).numbers)


class Kept(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = (0.1 * each for each in itertools.count())

    def scale(self) -> float:
        return next(self.numbers)


class Careless(Scaled):
    def scale(self) -> float:
        try:
            return 0.1 * float(next(COUNT))
        except Exception:  # noqa: BLE001
            return 0.1


class Opened(Scaled):
    def scale(self) -> float:
        with FILE.open() as file:
            return float(file.read())


class Asked(Scaled):
    def scale(self) -> float:
        return 0.5 if os.path.exists(FILE) else 0.25  # noqa: PTH110


class Loaded(Scaled):
    def scale(self) -> float:
        return float(torch.load(FILE))


class Written(Scaled):
    def scale(self) -> float:
        with FILE.open("a") as file:
            file.write("x")
        return 1.0


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def begin(number: int, tmp_path: Path, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands outside before a call."""
    monkeypatch.setattr(f"{__name__}.FILE", tmp_path / "file")
    if kind is Loaded:
        torch.save(torch.tensor(0.1 * number), tmp_path / "file")
    elif kind is Asked and number % 2:
        (tmp_path / "file").unlink(missing_ok=True)
    elif kind is not Written:
        (tmp_path / "file").write_text(f"{0.1 * number}")


def results(
    kind: type[nn.Module], compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], str]:
    """Those of some calls, and what is in the file afterwards."""
    monkeypatch.setattr(f"{__name__}.COUNT", itertools.count(1))
    monkeypatch.setattr(InClass, "numbers", iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
    model = seeded(kind)
    called = reroll.compile(model) if compiled else model
    x, found = torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(1)), []
    (tmp_path / "file").unlink(missing_ok=True)
    for number in range(4):
        begin(number, tmp_path, kind, monkeypatch)
        found.append(called(x).detach())
    return found, "" if kind in (Loaded, Asked) else (tmp_path / "file").read_text()


@pytest.mark.parametrize("kind", [Counted, Zipped, InClass, Kept, Careless, Opened, Asked, Loaded, Written])
@pytest.mark.filterwarnings("ignore")
def test_without_time_each_call_takes_what_the_plain_model_takes(
    kind: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, written = results(kind, False, tmp_path, monkeypatch)
    assert kind is Written or not all(torch.equal(each, want[0]) for each in want)
    found, also = results(kind, True, tmp_path, monkeypatch)
    torch.testing.assert_close(found, want)
    assert also == written


@pytest.mark.parametrize("kind", [Counted, Zipped, InClass, Careless])
def test_with_time_a_model_that_takes_from_an_iterator_is_refused_and_has_taken_nothing(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr(f"{__name__}.COUNT", numbers)
    monkeypatch.setattr(InClass, "numbers", itertools.count(1))
    name = "numbers" if kind is InClass else "COUNT"
    with pytest.raises(
        TakenError, match=rf"takes from an iterator, {name} \(a count\), at .*test_held_outside"
    ) as raised:
        reroll.compile(seeded(kind), time_dim=0)(torch.randn(9, 2, 3))
    assert "torch.tensor(next(" in str(raised.value)
    assert COUNT is numbers
    assert next(numbers) == 1
    assert next(InClass.numbers) == 1


def test_what_the_refusal_of_an_iterator_says_to_do_works() -> None:
    class Given(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[1], 3)
            for x_t in x:
                h = torch.tanh(x_t + scale * h)
            return h

    numbers, x = itertools.count(1), torch.randn(9, 2, 3)
    compiled = reroll.compile(Given(), time_dim={"x": 0})
    for _ in range(3):
        scale = torch.tensor(next(numbers))
        torch.testing.assert_close(compiled(x, scale), Given()(x, scale))


@pytest.mark.parametrize("kind", [Opened, Asked, Written])
def test_with_time_a_model_that_reads_or_writes_files_is_refused_before_it_does(
    kind: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(1, tmp_path, kind, monkeypatch)
    with pytest.raises(TakenError, match=r"reads or writes outside of Python .*test_held_outside.*before the model is"):
        reroll.compile(seeded(kind), time_dim=0)(torch.randn(9, 2, 3))
    assert kind is not Written or not (tmp_path / "file").exists()


def test_an_iterator_that_a_call_does_not_take_from_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.name = next(COUNT)

    model, x = seeded(Named), torch.randn(9, 2, 3)
    for given in GIVEN:
        torch.testing.assert_close(reroll.compile(model, **given)(x), model(x))
    assert next(COUNT) == model.name + 1  # type: ignore[operator]


def test_what_python_opens_by_itself_is_none_of_the_models(tmp_path: Path) -> None:
    class Importing(Scaled):
        def scale(self) -> float:
            import wave  # read from its file at the first call

            LOG.info("scale %s", wave.WAVE_FORMAT_PCM)
            return 1.0

    handler = logging.FileHandler(tmp_path / "log")
    LOG.addHandler(handler)
    try:
        model, x = seeded(Importing), torch.randn(9, 2, 3)
        for given in GIVEN:
            torch.testing.assert_close(reroll.compile(model, **given)(x), model(x))
    finally:
        LOG.removeHandler(handler)
        handler.close()


class Timed(Scaled):
    def scale(self) -> float:
        return time.perf_counter() % 1


def test_a_model_that_is_another_one_at_each_run_is_told_so() -> None:
    x = torch.randn(9, 2, 3)
    with pytest.raises(UnsteadyError, match=r"something else each time .*test_held_outside.*pass a tensor of it"):
        reroll.compile(seeded(Timed), time_dim=0, proof="first")(x)
    with pytest.warns(UserWarning, match="something else each time") as said:
        assert reroll.compile(seeded(Timed), proof="first")(x).isfinite().all()
    assert "Dynamo reads the model from now on." in str(said[0].message)


class Updating(Scaled):
    shown = False

    @torch.no_grad()
    def scale(self) -> float:
        self.update(self.frozen.weight)
        return 0.5

    def update(self, weight: Tensor) -> None:
        weight.lerp_(self.linear.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if self.shown:
            result.retain_grad()  # which no record tells
        return result


class ByData(Updating):
    def update(self, weight: Tensor) -> None:
        weight.data.clamp_(-0.2, 0.2).mul_(0.9)


class ByMemory(Updating):
    def update(self, weight: Tensor) -> None:
        weight.detach()[0] *= 0.9


class InHook(Updating):
    shown = True


@pytest.mark.parametrize("kind", [Updating, ByData, ByMemory, InHook])
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_changes_its_parameters(kind: type[nn.Module]) -> None:
    """Looks at it changed them, too: its results were others in silence."""
    plain = seeded(kind)
    model, named, x = copy.deepcopy(plain), copy.deepcopy(plain), torch.randn(9, 2, 3)
    compiled = reroll.compile(model)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), plain(x))
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
    before = copy.deepcopy(named.state_dict())
    with pytest.raises(UnsupportedError, match="changes a parameter in place"):
        reroll.compile(named, time_dim=0)(x)
    torch.testing.assert_close(named.state_dict(), before, rtol=0, atol=0)
