"""One program through one door: equal to eager, refused with a sentence, left to torch, or a defect."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from changed_networks import Mutant, network_of
from programs import Program
from rounding import with_digits
from torch._dynamo.exc import TorchDynamoException
from torch.utils._pytree import tree_map_only

import reroll
from reroll.backends.inductor.sizes.family import forget
from reroll.backends.measure.check import Difference
from reroll.backends.measure.plain import mean_squares
from reroll.backends.runtime.node import RecurrenceModule
from reroll.errors import DifferenceError, IllegalProgramError, ProofError, RerollError, RerollWarning
from reroll.graph.nested import tensors_of
from reroll.recurrence import Recurrence

SECONDS = 180
"""After which a program counts as one that gave no answer."""
TOLERANCE, SHORT = 1e-8, 1e-4  # of float64 throughout, and where a value of a step is float32
NUDGES = {TOLERANCE: 1e-13, SHORT: 1e-7}  # what moves numbers by more than rounding does
SIZES = (3, 5, 6, 8)  # of a batch: one compiled for itself, one by which sizes become symbols, and two more
MANY = 12  # steps of a call that torch alone may not run in silence
_JUDGED = itertools.count()  # Dynamo knows modules by their names
DEFECTS = ("wrong", "raw", "no answer", "silent")
_OURS = ("BackendCompilerFailed", "InductorError")  # Dynamo's names for what a backend raises, not for what it refuses


@dataclass(frozen=True)
class Way:
    """A door and its options: ``backend``, or ``reroll.compile`` under any other name (``any`` in older results)."""

    door: str
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.door}({', '.join(f'{name}={value!r}' for name, value in self.options)})"

    def text(self) -> str:
        """What compiles ``net`` this way."""
        if self.door == "backend":
            return f"torch.compile(net, backend='reroll', options={dict(self.options)})"
        given = "".join(f", {name}={value!r}" for name, value in self.options)
        return f"reroll.compile(net{given})"

    def compiled(self, model: Any) -> Any:
        """The model through this door."""
        if self.door == "backend":
            return torch.compile(model, backend="reroll", options=dict(self.options))
        return reroll.compile(model, **dict(self.options))


class Source(Protocol):
    """The text of a module with ``Net`` and ``inputs()``, and a seed for its numbers."""

    @property
    def seed(self) -> int:
        """Of parameters and inputs."""

    def source(self) -> str:
        """The text."""


@dataclass(frozen=True)
class Text:
    """A source that was kept."""

    seed: int
    text: str

    def source(self) -> str:
        """The text."""
        return self.text


@dataclass(frozen=True)
class Verdict:
    """``kind``: equal, refused, left (to torch), invalid (nothing to compare with), or one of ``DEFECTS``; and why.

    ``silent``: torch alone ran a call of ``MANY`` steps or more, and nothing said so. raised: the class of what was
    raised. error: the largest difference from eager, relative to the largest entry of its tensor.
    """

    kind: str
    why: str = ""
    raised: str = field(default="", compare=False)
    error: float = field(default=0.0, compare=False)


class NoAnswerError(BaseException):
    """Raised in a program that takes too long; no ``except Exception`` catches it."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise NoAnswerError inside after some CPU seconds, and after ten times as many by the clock: it may only wait."""

    def stop(*_: Any) -> None:
        raise NoAnswerError

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 10 * seconds))
    before = [signal.signal(told, stop) for _, told, _ in timers]
    for timer, _, after in timers:
        signal.setitimer(timer, after)
    try:
        yield
    finally:
        for (timer, told, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(told, handler)


def outcome(differences: Callable[[], Sequence[object]], seconds: int = SECONDS) -> Verdict:
    """What becomes of a comparison that gives all differences from eager, or raises."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with limited(seconds):
                found = differences()
        except NoAnswerError:
            return Verdict("no answer")
        except RerollError as error:
            return Verdict(_refusal(error), first_line(error), type(error).__name__)
        except TorchDynamoException as error:
            kind = "raw" if type(error).__name__ in _OURS else "refused"
            return Verdict(kind, f"{type(error).__name__}: {first_line(error)}", type(error).__name__)
        except Exception as error:  # noqa: BLE001
            return Verdict("raw", f"{type(error).__name__}: {first_line(error)}", type(error).__name__)
    if found:
        return Verdict("wrong", str(found[0]))
    text = [str(each.message) for each in told if issubclass(each.category, RerollWarning)]
    reasons = [each for each in text if "found no recurrence" in each]
    return Verdict("left", first_line(reasons[0])) if reasons else Verdict("equal")


def _refusal(error: RerollError) -> str:
    """What a refusal is: one of a proof says that a number is wrong, and one to be reported that nobody meant it."""
    if isinstance(error, ProofError | DifferenceError):
        return "wrong"
    return "raw" if isinstance(error, IllegalProgramError) or "please report" in str(error) else "refused"


def judge(program: Source, way: Way) -> Verdict:
    """What becomes of a program."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(program.seed)
    with tempfile.TemporaryDirectory() as folder:
        module = loaded(program.source(), Path(folder) / f"program{program.seed}_{next(_JUDGED)}.py")
        net, (args, kwargs) = module.Net(), module.inputs()
        tolerance = SHORT if "float()" in program.source() else TOLERANCE
        return compared(net, partial(way.compiled, net), args, kwargs, tolerance, loss=loss_of(program.seed))


def loss_of(seed: int) -> Callable[[Any], torch.Tensor]:
    """The loss of a seed: of all results, or of a part of them, as what a loss leaves out has no gradient."""
    draw = random.Random(f"loss of {seed}")
    part = draw.choice((slice(None), slice(None), slice(1), slice(-1, None), slice(1, None, 2)))

    def loss(result: Any) -> torch.Tensor:
        made = [each for each in tensors_of(result) if each.requires_grad]
        return mean_squares(made[part] or made)

    return loss


def judge_calls(program: Source, way: Way) -> Verdict:
    """What becomes of a program that calls its model several times (``kinds.py``)."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        plain, compiled = (Calls(program, Path(folder), each) for each in (None, way))
        verdict = compared(plain, lambda: compiled, (torch.ones(97),), {}, TOLERANCE, compiled.others_than)
    if verdict.kind != "equal" or all(call.rolled or call.steps < MANY for call in compiled.made):
        return verdict
    told = [text for call in compiled.made for text in call.told]
    if told:
        return Verdict("left", first_line(told[0]))
    silent = next(call for call in compiled.made if not call.rolled and call.steps >= MANY)
    return Verdict("silent", f"nothing is rolled of a call of {silent.steps} steps")


def judge_sizes(program: Program, way: Way) -> Verdict:
    """What becomes of a program at several sizes of the batch, of which the second and later ones share their code."""
    forget()
    texts = (Text(program.seed, program.source(batch)) for batch in SIZES)
    verdicts = [judge(text, way) for text in texts]
    return next((each for each in verdicts if each.kind in DEFECTS), verdicts[-1])


def loaded(text: str, path: Path) -> Any:
    """A module with this text, in a file, so that errors name its lines."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def judge_mutant(mutant: Mutant, way: Way) -> Verdict:
    """What becomes of a mutant."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(mutant.seed)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with limited(SECONDS):
                net = network_of(mutant, loaded, Path(folder) / f"mutant{mutant.seed}.py")
                given = net.network.inputs(net.network.steps)
        except (Exception, NoAnswerError) as error:  # the program is none  # noqa: BLE001
            return Verdict("invalid", first_line(error))
        leaf = net.network.leaf
        args = tree_map_only(torch.Tensor, lambda v: v.requires_grad_(leaf) if v.is_floating_point() else v, given)
        return compared(net, partial(way.compiled, net), args, {}, None)  # some compute in half precision


def compared(
    net: Any,
    compiled: Callable[[], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tolerance: float | None,
    others: Callable[[], Iterable[Difference]] = tuple,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Verdict:
    """What becomes of a model.

    tolerance: of ``reroll.check``. others: what differs beside all that it sees.
    """
    check = partial(reroll.check, loss=loss, measure=False)
    try:
        plain = check(_Plain(net), *args, **kwargs)
        assert plain.equal, "eager differs from itself"
    except Exception as error:  # the program is none  # noqa: BLE001
        return Verdict("invalid", first_line(error))

    found, errors = list[Difference](), [0.0]

    def differences() -> Sequence[Difference]:
        seen = check(compiled(), *args, tolerance=tolerance, **kwargs)
        errors.append(seen.error)
        found[:] = [*others(), *seen.differences]
        return found

    verdict = replace(outcome(differences), error=errors[-1])
    if verdict.kind == "no answer" and _inductor_is_stuck(net, args, kwargs):
        return Verdict("invalid", "inductor by itself gives no answer")
    if verdict.kind != "wrong":
        return verdict
    nudge = NUDGES[TOLERANCE if tolerance is None else tolerance]
    left = with_digits(found, partial(check, tolerance=tolerance), net, args, kwargs, nudge)
    return Verdict("wrong", str(left[0])) if left else Verdict("invalid", f"eager has no such digits: {verdict.why}")


def _inductor_is_stuck(net: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether plain ``torch.compile`` gives no answer either: inductor writes out all that is read twice, and that is
    exponential in a chain of it."""
    torch._dynamo.reset()
    compiled: Any = torch.compile(net)
    try:
        with limited(SECONDS):
            compiled(*args, **kwargs)
    except NoAnswerError:
        return True
    except Exception:  # another defect of the program  # noqa: BLE001
        return False
    return False


@dataclass
class Call:
    """A call of a compiled model: its steps, those that were rolled, and what was told."""

    steps: int
    rolled: int = 0
    told: list[str] = field(default_factory=list)


class Calls:
    """All calls of a new model of a program, compiled a ``way`` or not, as one call of a model without inputs.

    It gives all tensors that can be seen, by name; everything else is in a file, as ``reroll.check`` puts back what the
    plain calls leave behind. ``made``: the calls.
    """

    def __init__(self, program: Source, folder: Path, way: Way | None) -> None:
        self.program, self.folder, self.way = program, folder, way
        self.reroll_caller, self.model = self, self if way is None else Calls(program, folder, None)
        self.made: list[Call] = []
        self.others = folder / f"{'plain' if way is None else 'compiled'}.json"

    def __call__(self, moves: torch.Tensor) -> dict[str, torch.Tensor]:
        """Make the calls; ``moves`` are what numbers are multiplied by."""
        module = loaded(self.program.source(), self.folder / f"kinds{self.program.seed}_{next(_JUDGED)}.py")
        self.made, way = [], self.way
        seen = module.calls((lambda net: net) if way is None else lambda net: self._watched(way.compiled(net)), moves)
        self.others.write_text(json.dumps({name: each for name, each in seen.items() if isinstance(each, str)}))
        return {name: each for name, each in seen.items() if isinstance(each, torch.Tensor)}

    def others_than(self) -> Iterator[Difference]:
        """What is not a tensor and other than in the plain calls."""
        plain, compiled = (json.loads(each.others.read_text()) for each in (self.model, self))
        for name in dict.fromkeys((*plain, *compiled)):
            before, after = (each.get(name, "nothing") for each in (plain, compiled))
            if before != after:
                yield Difference(name, f"{after} instead of {before}")

    def _watched(self, compiled: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            made = Call(len(args[0]))
            self.made.append(made)
            with warnings.catch_warnings(record=True) as told, played() as loops:
                warnings.simplefilter("always")
                result = compiled(*args)
            made.rolled = sum(loop.steps for loop in loops)
            made.told += [str(each.message) for each in told if issubclass(each.category, RerollWarning)]
            return result

        return call


@contextmanager
def played() -> Iterator[list[Recurrence]]:
    """The loops that are played meanwhile."""
    original, loops = RecurrenceModule.played, list[Recurrence]()

    def noted(self: RecurrenceModule, *args: Any) -> Any:
        loops.append(self.executable.recurrence)
        return original(self, *args)

    with mock.patch.object(RecurrenceModule, "played", noted):
        yield loops


class _Plain:
    """A model that ``reroll.check`` compares with itself."""

    def __init__(self, model: Any) -> None:
        self.reroll_caller = self
        self.model = model

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.model(*inputs, **kwargs)


_LINE = re.compile(
    r'File "[^"]*", line \d+, in [\w<>]+: .*?'
    r"(?=\. [A-Z]|; |,? \(?(?:has|reads|changes|differs|were|which|are)\b|$)"
)
"""A place in a model, up to where the message goes on."""
_FOLDER = re.compile(r"/[^\s:\"')]*/(?=\w+\.py)")


def first_line(error: object) -> str:
    """The beginning of a message, without places and numbers, so that equal reasons are counted together."""
    first, *others = str(error).strip().splitlines() or [""]
    text = f"{first} {others[0]}" if first.endswith("raised:") and others else first  # Dynamo says why in the second
    text = _FOLDER.sub("", _LINE.sub("<line>", text))
    return re.sub(r"\d+", "N", text)[:300]
