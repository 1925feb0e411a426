"""What every test starts from: one thread, a fixed seed, nothing compiled."""

import gc
import inspect
import os
import shutil
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.guards

import walks
from reroll.backends.codecs.codec import CODECS
from reroll.backends.construct import kernels
from reroll.backends.construct.lent import LENDERS
from reroll.backends.construct.stages.proof import Proof
from reroll.backends.construct.stages.trial import Trial
from reroll.backends.runtime.executable import Executable
from reroll.backends.tiers.tier import TIERS
from reroll.planning.options import Options
from reroll.program.registry import PASSES, find
from reroll.schedules.machine import REMOTE_TIERS
from reroll.schedules.named import SCHEDULES
from simulation import check_races

MOST_STEPS = 1000

torch.set_num_threads(1)
_guards: Any = torch._dynamo.guards
# Dynamo times the guards of every frame, with the caches of the processor emptied, and only logs what it finds.
_guards.profile_guard_manager = lambda *_: 0.0


def _spare() -> None:
    """Spare the garbage collector what lives to the end, millions of objects of torch: an eighth of the time."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="make tensors and modules there unless a test says where, such as on cuda")


def pytest_configure(config: pytest.Config) -> None:
    if "REROLL_CACHE_DIR" not in os.environ:  # workers take the folder of the run that started them
        os.environ["REROLL_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="reroll-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if device := config.getoption("--device"):
        torch.set_default_device(device)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``variants(count)`` so many sets of parameters run on every change, all in ``make campaign``.

    Which ones depends on their names alone, as good as drawn by chance: every n-th one could leave out an option.
    """
    families = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("variants"):
            families[item.nodeid.partition("[")[0]].append(item)
    for family in families.values():
        marker = family[0].get_closest_marker("variants")
        assert marker is not None
        drawn = sorted(family, key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in drawn[marker.args[0] :]:
            item.add_marker(pytest.mark.campaign)


def pytest_collection_finish() -> None:
    _spare()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True, scope="module")
def _caches() -> Iterator[None]:
    """What a file leaves in torch's caches."""
    yield
    _spare()


@pytest.fixture(autouse=True)
def _nothing_lent() -> None:
    """What other tests compiled, some of it wrong on purpose, is lent to no evaluation."""
    LENDERS.forget()


@pytest.fixture(autouse=True)
def _no_traces_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tests of the cache keep traces: others would write each one, and never read it."""
    if request.path.parent.name != "cache":
        monkeypatch.setattr(kernels, "trace_key", lambda *_: None)


UNPROVED = {"card", "inductor", "measure", "planning", "runtime", "tiers"}


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program is proved unless a test asks for it: where bytes, calls and drawn numbers are counted."""
    made: Any = Options.__init__
    monkeypatch.setattr(made, "__defaults__", tuple("never" if each == "first" else each for each in made.__defaults__))


@pytest.fixture(autouse=True)
def _compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs begin with compiled segments unless a test asks for eager ones: it is compiled code that is tested."""
    made: Any = Options.__init__
    names, defaults = list(inspect.signature(made).parameters), list(made.__defaults__)
    defaults[names.index("start") - len(names)] = "compiled"
    monkeypatch.setattr(made, "__defaults__", tuple(defaults))


@pytest.fixture(autouse=True)
def _proved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders in which all tests count have no proofs. Elsewhere a comparison that cannot be made is an error."""
    if not UNPROVED.isdisjoint(request.path.parts):
        request.getfixturevalue("unproved")

    def fail(_: Any, error: Exception) -> None:
        raise error

    monkeypatch.setattr(Trial, "_fail", fail)
    monkeypatch.setattr(Proof, "_fail", fail)


@pytest.fixture(autouse=True)
def _fresh_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed torch before a test and drop what it compiled afterwards."""
    torch.manual_seed(0)
    yield
    if "shared_walks" not in request.fixturenames:
        torch.compiler.reset()


@pytest.fixture(scope="module")
def shared_walks() -> Iterator[None]:
    """What Dynamo traced in a test serves the others of the file."""
    with walks.kept():
        yield


@pytest.fixture(autouse=True)
def _no_races(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Play every program that moves carries on a simulated device too, and look for races, if it is of a usual size."""
    if request.config.getoption("--device"):
        return  # the simulated device's memory is that of a CPU
    made = Executable.of

    def checked(*args: Any, **kwargs: Any) -> Executable:
        executable = made(*args, **kwargs)
        if executable.tiers and executable.recurrence.steps <= MOST_STEPS:
            check_races(executable)
        return executable

    monkeypatch.setattr(Executable, "of", checked)


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Make float64 the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def rnn_layers() -> Iterator[None]:
    """Let Dynamo capture torch's recurrent layers."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it: passes, schedules, codecs, tiers."""
    find("save")
    for registry in (PASSES, SCHEDULES, CODECS, REMOTE_TIERS, TIERS):
        monkeypatch.setattr(registry, "_values", dict(registry._values))
        monkeypatch.setattr(registry, "_points", None)
