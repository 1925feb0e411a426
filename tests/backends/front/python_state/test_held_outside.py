"""What a model takes from where nothing can be put back (iterators, files, the clock), and parameters it changes."""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.full.at_length import Missing

COUNT: Iterator[Any] = itertools.count(1)
FILE = Path("nowhere")
LOG = logging.getLogger(__name__)


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
@pytest.mark.filterwarnings("ignore")
def test_what_a_model_takes_from_an_iterator_is_taken_once_at_every_length(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[list[Any]]()
    for compiles in (True, False):
        numbers = itertools.count(1)
        monkeypatch.setattr(f"{__name__}.COUNT", numbers)
        monkeypatch.setattr(InClass, "numbers", itertools.count(1))
        model, taken = seeded(kind), list[Any]()
        called = reroll.compile(model, lowering="eager") if compiles else model
        for steps in (9, 14, 9):
            x = torch.randn(steps, 2, 3, generator=torch.Generator().manual_seed(steps)).requires_grad_()
            y = called(x)
            y.square().sum().backward()
            taken += [y.detach(), x.grad, model.get_parameter("linear.weight").grad]
            model.zero_grad()
        assert COUNT is numbers
        found.append([*taken, next(COUNT), next(InClass.numbers)])
    torch.testing.assert_close(*found)


def test_what_an_iterator_gives_may_be_given() -> None:
    class Given(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[1], 3)
            for x_t in x:
                h = torch.tanh(x_t + scale * h)
            return h

    numbers, x = itertools.count(1), torch.randn(9, 2, 3)
    compiled = reroll.compile(Given())
    for _ in range(3):
        scale = torch.tensor(next(numbers))
        torch.testing.assert_close(compiled(x, scale), Given()(x, scale))


class Imported(Scaled):
    """Imports a module in its forward, as libraries do; anew in each run, if wanted."""

    again = False

    def scale(self) -> float:
        if self.again:
            sys.modules.pop("imported_scale", None)
        import imported_scale  # type: ignore[import-not-found]

        return float(imported_scale.SCALE)


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a module reads that can be imported."""
    read = "from pathlib import Path\nSCALE = float(Path(__file__).with_suffix('.txt').read_text())"
    (tmp_path / "imported_scale.py").write_text(read)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "imported_scale.txt"
    sys.modules.pop("imported_scale", None)


def test_what_a_module_reads_when_it_is_imported_is_read_once(imported: Path) -> None:
    """A model whose first call imports a module is recorded all the same."""
    plain = seeded(Imported)
    compiled: Any = reroll.compile(copy.deepcopy(plain), lowering="eager")
    for steps, scale in ((9, "0.5"), (14, "0.25"), (9, "0.75")):
        imported.write_text(scale)
        x = torch.randn(steps, 2, 3)
        torch.testing.assert_close(compiled(x), plain(x))
    assert not compiled.reroll_caller.is_read


ELSEWHERE = """
import torch
TENSOR, NAMES, TABLE, GENERATOR = torch.zeros(3), [], {}, torch.Generator().manual_seed(3)

class Counter:
    count = 0

def by_tensor():
    TENSOR.add_(0.1)
    return 0.5

def by_list():
    NAMES.append("a")
    return 0.1 * len(NAMES)

def by_table():
    TABLE["count"] = TABLE.get("count", 0) + 1
    return 0.1 * TABLE["count"]

def by_class():
    Counter.count += 1
    return 0.1 * Counter.count

def by_generator():
    return torch.rand((), generator=GENERATOR)
"""


class Reaching(Scaled):
    """Calls what nothing leads to but a text that is put together."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second = "elsewhere", name

    def scale(self) -> Any:
        return vars(importlib.import_module("imported_" + self.first))["by_" + self.second]()


@pytest.mark.parametrize("name", ["tensor", "list", "table", "class", "generator"])
@pytest.mark.filterwarnings("ignore")
def test_what_a_function_changes_that_nothing_leads_to_is_changed_once_a_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before the first record was not put back."""
    (tmp_path / "imported_elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(tmp_path)
    found = list[Any]()
    for compiles in (False, True):
        sys.modules.pop("imported_elsewhere", None)
        torch.manual_seed(0)
        model, x = Reaching(name), torch.randn(9, 2, 3)
        run = reroll.compile(model, lowering="eager") if compiles else model
        values = [run(x).detach() for _ in range(3)]
        there = sys.modules["imported_elsewhere"]
        left = [there.TENSOR, len(there.NAMES), there.TABLE.get("count"), there.Counter.count]
        found.append([*values, *left, there.GENERATOR.get_state()])
    sys.modules.pop("imported_elsewhere", None)
    torch.testing.assert_close(*found)


REGISTRY: dict[str, float] = {}


class Registered(Scaled):
    """Reads what a module leaves elsewhere that its forward imports."""

    def scale(self) -> float:
        import imported_scale  # noqa: F401

        return REGISTRY.get("scale", 1.0)


@pytest.mark.parametrize("proof", ["first", "never"])
def test_what_an_import_leaves_elsewhere_stays(proof: Any, imported: Path) -> None:
    """A look put it back, while the module stayed imported."""
    registry = f"import sys; sys.modules[{__name__!r}].REGISTRY['scale'] = 0.25"
    imported.with_suffix(".py").write_text(registry)
    REGISTRY.clear()
    plain, x = seeded(Registered), torch.randn(9, 2, 3)
    compiled: Any = reroll.compile(copy.deepcopy(plain), lowering="eager", proof=proof)
    found = compiled(x)
    assert REGISTRY == {"scale": 0.25}
    torch.testing.assert_close(found, plain(x))
    assert not compiled.reroll_caller.is_read


def test_a_model_may_do_without_a_module() -> None:
    class Without(Scaled):
        def scale(self) -> float:
            try:
                import no_such_module  # type: ignore[import-not-found]

                return float(no_such_module.SCALE)
            except ImportError:
                return 0.5

    plain, x = seeded(Without), torch.randn(9, 2, 3)
    compiled: Any = reroll.compile(copy.deepcopy(plain), lowering="eager")
    torch.testing.assert_close(compiled(x), plain(x))
    assert not compiled.reroll_caller.is_read


def test_a_module_that_each_run_imports_anew_is_not_recorded(imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Imported, "again", True)
    imported.write_text("0.5")
    compiled: Any = reroll.compile(seeded(Imported), lowering="eager")
    assert compiled.reroll_caller.at_length.found(Call((torch.randn(9, 2, 3),), {})) is Missing.UNTOLD


@pytest.mark.parametrize("kind", [Opened, Asked, Written])
@pytest.mark.filterwarnings("ignore")
def test_a_model_reads_and_writes_files_as_often_as_it_is_called(
    kind: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = seeded(kind)
    compiled = reroll.compile(copy.deepcopy(plain), lowering="eager")
    (tmp_path / "file").unlink(missing_ok=True)
    for number, steps in enumerate((9, 14, 9), start=1):
        x = torch.randn(steps, 2, 3)
        begin(number, tmp_path, kind, monkeypatch)
        found = compiled(x)
        assert kind is not Written or (tmp_path / "file").read_text() == "x" * (2 * number - 1)
        torch.testing.assert_close(found, plain(x))  # which writes, too


def test_an_iterator_that_a_call_does_not_take_from_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.name = next(COUNT)

    model, x = seeded(Named), torch.randn(9, 2, 3)
    torch.testing.assert_close(reroll.compile(model)(x), model(x))
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
        torch.testing.assert_close(reroll.compile(model)(x), model(x))
    finally:
        LOG.removeHandler(handler)
        handler.close()


class Timed(Scaled):
    def scale(self) -> float:
        return time.perf_counter() % 1


def test_a_model_that_is_another_one_at_each_run_is_told_so() -> None:
    x = torch.randn(9, 2, 3)
    told = r"something else each time .*test_held_outside.*pass a tensor of it"
    with pytest.warns(UserWarning, match=told) as said:
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
    model = copy.deepcopy(plain)
    compiled = reroll.compile(model, lowering="eager")
    for steps in (9, 9, 14, 9):
        x, found = torch.randn(steps, 2, 3), list[Any]()
        for each, called in ((model, compiled), (plain, plain)):
            each.zero_grad()
            y = called(x)
            y.square().sum().backward()
            found.append(
                [y.detach(), *(value.grad for value in each.get_submodule("linear").parameters()), each.state_dict()]
            )
        torch.testing.assert_close(*found)


LEVEL: ContextVar[int] = ContextVar("LEVEL", default=0)


@pytest.mark.parametrize("sets", [True, False])
def test_context_variables_are_dynamos(sets: bool) -> None:
    """A record holds what they were, in silence."""

    def leveled(x: Tensor) -> Tensor:
        if sets:
            LEVEL.set(LEVEL.get() + 1)
        h = torch.zeros_like(x[0])
        for row in x:
            h = torch.tanh(row + h * (LEVEL.get() % 3))
        return h

    run, found = reroll.compile(leveled, lowering="eager", proof="never"), []
    for each in (run, leveled):
        LEVEL.set(0)
        values = []
        for call in range(5):
            values.append(each(torch.linspace(-1, 1, 21).view(7, 3)))
            LEVEL.set(LEVEL.get() + call)
        found.append([*values, torch.tensor(LEVEL.get())])
    torch.testing.assert_close(*found)
