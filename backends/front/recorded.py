"""The first way from a model to its graphs: they are recorded while Python runs it.

A recording runs what stands for its graph and puts results where the model puts them. Dynamo's guards are replaced by a
key of all that can be reached from the model and its arguments.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.observe import (
    NOT_AN_OPERAND,
    UpdatedError,
    isolated_run,
    line_that_leaves,
    refuse_sparse,
)
from reroll.backends.front.python_state.attributes import attributes
from reroll.backends.front.python_state.keys import plain
from reroll.backends.front.python_state.late import Late
from reroll.backends.front.python_state.names import Assigned, Flag
from reroll.backends.front.python_state.object_graph import has_attributes
from reroll.backends.front.python_state.outside import FirstImportError, TakenError
from reroll.backends.front.python_state.ran import Ran
from reroll.backends.front.python_state.state import Change, State
from reroll.backends.front.python_state.state_cache import Reach
from reroll.backends.processes.wrappers import CollectiveError
from reroll.backends.progress import tell
from reroll.backends.runtime.randomness import move_on, numpy_state
from reroll.capture.recorder.graph import GraphRecorder, Unrecordable
from reroll.capture.recorder.hidden_effects import PlainRun
from reroll.capture.recorder.identity import by_value, fingerprint, is_a
from reroll.capture.recorder.ragged import LONGEST
from reroll.capture.steps.modules import PATH
from reroll.errors import UnsupportedError, is_shortage, warn
from reroll.graph.nested import leaves_of, like, opened, with_leaves
from reroll.graph.private import saved_as_it_is, without_hooks_of_all_modules

Backend = Callable[[fx.GraphModule], Callable[..., Any]]
_RECORDINGS = 256  # each with a program, 1.5 MB
_SOME = 2  # numbers in a call that are worth a word where they change


class AnotherAnswerError(UnsupportedError):
    """The model would have been given another answer than in its record; nothing but random numbers has changed, and
    what it updates in place. ``line``: where it asks."""

    line = ""


class RaisedError(Unrecordable):
    """A model raised in the run that records it, and in those before."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A graph of a model, as the backend runs it, with where its operands are and its results go.

    read: positions of the operands in ``State.tensors``. skeleton: the model's result and the new values of its
    attributes, of ``ResultSlot``. changed: where these are, as owner and key of ``State.owners``. applied: fingerprints
    of the ``autograd.Function``s known when it was made. sizes: values of tensors, by position, that are sizes in it.
    cleared: positions of the tensors of which the model reads nothing, and which it zeroes and cuts off their history.
    asked: the lines that ask for the truth of values, with the answers; these values are the last results of the graph.
    flags: the globals that the model sets to a truth value, a text or None.
    """

    run: Callable[..., Any]
    read: Sequence[int]
    skeleton: Any
    changed: tuple[tuple[int | None, Any], ...]
    applied: tuple[Any, ...]
    sizes: Mapping[int, int]
    cleared: Sequence[int]
    asked: tuple[tuple[str, bool], ...]
    flags: tuple[Flag, ...] = ()

    def holds(self, state: State, applied: tuple[Any, ...]) -> bool:
        """Whether functions and sizes are those of the recording."""
        same = all(int(state.tensors[index][0]) == size for index, size in self.sizes.items())
        return same and self.applied == applied

    def replay(self, state: State, run: Callable[..., Any] | None = None) -> Any:
        """Run the graph on the present tensors, change attributes as the model does, and give its result."""
        results = self._results([state.tensors[index][0] for index in self.read], run or self.run)
        self._check_answers(results[len(results) - len(self.asked) :])
        with torch.no_grad():
            for index in self.cleared:
                state.tensors[index][0].zero_().detach_()
        returned, *values = _filled(self.skeleton, results)
        owners = state.owners
        for (owner, key), value in zip(self.changed, values, strict=True):
            owners[owner][key] = value  # type: ignore[index]
        for space, name, value in self.flags:
            space[name] = value
        return returned

    def _results(self, operands: Sequence[Tensor], run: Callable[..., Any]) -> Any:
        with _operands_alone():
            return run(*operands)

    def _check_answers(self, values: Sequence[Tensor]) -> None:
        """Raise AnotherAnswerError where the model would have been given another answer."""
        for (line, answer), value in zip(self.asked, values, strict=True):
            if not bool((value == answer).all()):
                error = AnotherAnswerError(
                    f"The model asks at {line} whether a value is true. It was {answer} when reroll.compile recorded "
                    f"the model's operations, and is {not answer} now; a record cannot branch. Buffers that "
                    "the model updates in place have been updated. "
                    "Take the branch out of the model (torch.where), or call the model as it is for such inputs."
                )
                error.line = line
                raise error


@dataclass(frozen=True, slots=True)
class ResultSlot:
    """Where result ``index`` of a graph belongs, or another value."""

    index: int = -1
    value: Any = None


class Recorded:
    """A model whose graphs are recorded, once for everything that ``key_of`` tells apart.

    folds: runs that repeat are left out of graphs.
    """

    def __init__(self, model: Callable[..., Any], *, folds: bool = False) -> None:
        self.model, self.folds = model, folds
        self.recordings: OrderedDict[Any, Recording] = OrderedDict()
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.numbers: list[int] | None = None
        self.told = False

    def recording(self, reach: Reach, call: Call, backend: Backend) -> tuple[Recording, State, Any]:
        """The recording of the model for a call, the call's state and its key. Where there is none yet, it is made of a
        run, by what ``backend`` gives for its graph. Raises Unrecordable."""
        state, key = reach.noted(self.model, call.args, call.kwargs)
        if key not in self.recordings or not self.recordings[key].holds(state, self.applied()):
            self._tell_of_numbers([leaf for leaf in leaves_of((call.args, call.kwargs)) if type(leaf) is int])
            module, made = self.record(call, reach.ran)
            with _operands_alone():
                recording = made(backend(module))
            state, key = reach.noted(self.model, call.args, call.kwargs)  # more is known of what it reads
            self.recordings[key] = recording
            if len(self.recordings) > _RECORDINGS:
                self.recordings.popitem(last=False)
        self.recordings.move_to_end(key)
        return self.recordings[key], state, key

    @property
    def asked(self) -> list[str]:
        """The lines of the model that ask whether a value is true, also of packed sequences."""
        return list(dict.fromkeys(line for each in self.recordings.values() for line, _ in each.asked))

    @property
    def questions(self) -> list[str]:
        """Those but for what packed sequences ask."""
        return [line for line in self.asked if not line.endswith(LONGEST)]

    def _tell_of_numbers(self, numbers: list[int]) -> None:
        """Warn, once, where a call is recorded whose arguments hold other numbers than those of the one before."""
        before, self.numbers = self.numbers, numbers
        if self.told or before is None or before == numbers or len(numbers) < _SOME or len(before) < _SOME:
            return
        self.told = True
        warn(
            f"The arguments hold {len(numbers)} numbers, other ones than in the call before, and a record of "
            "the model holds for one set of numbers: it is recorded and checked anew for each, which takes seconds. If "
            "they are lengths, give a tensor (torch.tensor(lengths)), for whose values a record holds.",
        )

    def record(self, call: Call, ran: Ran) -> tuple[fx.GraphModule, Callable[..., Recording]]:
        """The graph of a run of the model, and what makes a recording of what the backend gives for it. What the code
        that runs names has places among the operands, too. So the model runs once before its first record, and where
        other code ran in a record than before it is recorded again. What it imports is imported before. Raises
        RaisedError where it raises in all runs.
        """
        while True:
            try:
                return self._record(call, ran)
            except FirstImportError as error:
                ran.imports(error.module)

    def _record(self, call: Call, ran: Ran) -> tuple[fx.GraphModule, Callable[..., Recording]]:
        refuse_sparse(self.model, call)
        if not ran.functions or not ran.whole:
            self.ends(call, ran)
            ran.whole = True
        known = len(ran.functions)
        try:
            made = self._recorded(call, ran)
        except Unrecordable:
            if len(ran.functions) == known:
                raise
        else:
            if len(ran.functions) == known:
                return made
        return self._recorded(call, ran)

    def ends(self, call: Call, ran: Ran) -> bool:
        """Run the model with nothing around it, for what code runs: whether it raises nothing."""
        with unheard(), _refused():
            try:
                self._run_alone(call, ran)
            except (UpdatedError, TakenError, CollectiveError, FirstImportError):
                raise
            except Exception:  # noqa: BLE001  # the model's own
                return False
        return True

    def _recorded(self, call: Call, ran: Ran) -> tuple[fx.GraphModule, Callable[..., Recording]]:
        try:
            with _refused():
                return self._written(call, ran)
        except RaisedError as error:
            if self.ends(call, ran):
                raise Unrecordable(str(error)) from error.__cause__
            raise

    def _written(self, call: Call, ran: Ran) -> tuple[fx.GraphModule, Callable[..., Recording]]:
        with isolated_run(self.model, call, parameters=True, ran=ran.functions) as state:
            outside = [value for value, _, _ in state.tensors]
            paths = self._paths()
            move_on()
            names = {number: _identifier(name) for number, name in (paths | call.names()).items()}
            recorder = GraphRecorder(outside, self.functions, names, folds=self.folds)
            for value, node in zip(outside, recorder.inputs, strict=True):
                node.meta[PATH] = paths.get(id(value), "")
            result = self._run(recorder, call, ran)
            if moved := state.moved_on():
                raise Unrecordable(f"The model draws or reads from an object that it holds ({moved}).")
            _check_names(state.assigned)
            flags = tuple(state.assigned.flags()) if state.assigned is not None else ()
            changes = tuple(change for change in state.changes() if not _same(change))
            _check_tree((result, *(each.value for each in changes)), state)
            _check_keys((result, *(each.value for each in changes)), [each.key for each in changes], call)
            results: list[Any] = []
            skeleton = [with_leaves(partial(_place, results, {}), result)]
            for change in changes:
                if not _is_recordable(change):
                    raise self._unrecordable(call, change)
                skeleton.append(with_leaves(partial(_own_place, results), change.value))
            module, read, sizes = recorder.finish(results)
        changed = tuple((change.owner, change.key) for change in changes)
        return module, partial(
            Recording,
            read=read,
            skeleton=skeleton,
            changed=changed,
            applied=self.applied(),
            sizes=sizes,
            cleared=recorder.cleared,
            asked=tuple(recorder.asked),
            flags=flags,
        )

    def _run_alone(self, call: Call, ran: Ran) -> None:
        no_tape = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
        with (
            isolated_run(self.model, call, parameters=True) as state,
            no_tape,
            torch.compiler.set_stance("force_eager"),
            Late(state) as late,
            ran.noting(late.meet),
            PlainRun(),
        ):
            call.run(self.model)

    def _paths(self) -> dict[int, str]:
        """Where in the model its parameters and buffers are (``blocks.3.weight``), by their identity."""
        owner: Any = getattr(self.model, "__self__", self.model)
        held = [*owner.named_parameters(), *owner.named_buffers()] if is_a(owner, nn.Module) else []
        return {id(value): name for name, value in held}

    def _unrecordable(self, call: Call, change: Change) -> Unrecordable:
        line = line_that_leaves(self.model, call, lambda each: each.name == change.name)
        return Unrecordable(
            f"The model changes {change.name.lstrip('0123456789 ')} to a {type(change.value).__name__}, at {line}. A "
            "recorded model may only assign tensors to attributes and items that stay: return everything else, or "
            "compute it from the arguments."
        )

    def applied(self) -> tuple[Any, ...]:
        """What the ``autograd.Function``s that were applied do: a slope in one of them may be set between calls."""
        return tuple(
            (fingerprint(function), tuple((place, by_value(object_.value)) for place, object_ in objects))
            for function, objects in self.functions
        )

    def _run(self, recorder: GraphRecorder, call: Call, ran: Ran) -> Any:
        drawn, console = _random_states(), io.StringIO()
        try:
            silent = contextlib.redirect_stdout(console)
            with ran.noting(), saved_as_it_is(), recorder.recording(), silent, _complaints() as complaints:
                result = call.run(self.model)
        except (Unrecordable, TakenError, CollectiveError, FirstImportError):
            raise
        except Exception as error:
            if is_shortage(error):
                raise  # the next call may have more memory
            text = f"The model raised {type(error).__name__} in a run that records it: {error}"
            raise RaisedError(text) from error
        if console.getvalue() or complaints.heard:
            raise Unrecordable("The model prints, which a record of its operations does not tell.")
        if _random_states() != drawn:
            raise Unrecordable("The model draws from Python's or numpy's random numbers. Draw from torch's.")
        return result


@contextlib.contextmanager
def _operands_alone() -> Iterator[None]:
    """Call no hooks of all modules. Raise Unrecordable where code that is traced reads a tensor of its own."""
    try:
        with without_hooks_of_all_modules():
            yield
    except AssertionError as error:
        if NOT_AN_OPERAND not in str(error):
            raise
        raise Unrecordable(
            "The model applies an autograd.Function whose forward or backward reads a tensor that is none of its "
            "operands (a global, an attribute of a module), which a record of its operations does not tell."
        ) from error


class _Complaints:
    """Stands for ``sys.stderr`` and keeps what a thread writes there, but for warnings and what reroll tells, until it
    is ``over``: whoever holds it then, such as a handler of logs, writes where everybody does."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.thread, self.heard, self.over = stream, threading.get_ident(), False, False

    def write(self, text: str) -> Any:
        """Write to the stream, or only note that."""
        told = sys._getframe(1).f_globals.get("__name__") in ("warnings", tell.__module__)
        if self.over or told or threading.get_ident() != self.thread:
            return self.stream.write(text)
        self.heard = True
        return len(text)

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's."""
        return getattr(self.stream, name)


@contextlib.contextmanager
def _complaints() -> Iterator[_Complaints]:
    """What this thread writes to ``sys.stderr`` inside is kept."""
    made = _Complaints(sys.stderr)
    if sys.stderr is None:
        yield made
        return
    try:
        with contextlib.redirect_stderr(made):
            yield made
    finally:
        made.over = True


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """What is printed inside, and what the model writes to ``sys.stderr``, nobody sees."""
    with contextlib.redirect_stdout(io.StringIO()), _complaints():
        yield


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Raise what is refused in any run of the model as Unrecordable."""
    try:
        yield
    except (UpdatedError, TakenError, CollectiveError) as refused:
        raise Unrecordable(str(refused)) from refused


def _random_states() -> Any:
    """The states of the generators of random numbers that a graph does not draw from."""
    return random.getstate(), numpy_state()


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "value"


def _place(results: list[Any], known: dict[int, ResultSlot], leaf: Any) -> ResultSlot:
    """A place for a tensor, one for each; other leaves stay. Raises Unrecordable for what may hold tensors, unseen."""
    if isinstance(leaf, Tensor):
        if id(leaf) not in known:
            known[id(leaf)] = ResultSlot(len(results))
            results.append(leaf)
        return known[id(leaf)]
    if not plain(leaf):
        raise Unrecordable(f"The model gives a {type(leaf).__name__}, not tensors and numbers in tuples, lists, dicts.")
    return ResultSlot(value=leaf)


def _own_place(results: list[Any], leaf: Any) -> ResultSlot:
    """The same for an attribute: a result of its own, apart from others, so that it is no row of a list."""
    results.append(None)
    return _place(results, {}, leaf)


def _filled(skeleton: Any, results: Sequence[Any]) -> Any:
    """A new result like a skeleton."""
    if isinstance(skeleton, ResultSlot):
        return skeleton.value if skeleton.index < 0 else results[skeleton.index]
    inside = opened(skeleton)
    if isinstance(inside, Mapping):
        return like(skeleton, {key: _filled(item, results) for key, item in inside.items()})
    return like(skeleton, [_filled(item, results) for item in inside])


def _check_tree(values: Sequence[Any], state: State) -> None:
    """Raise Unrecordable where what a forward leaves is no tree of tensors: a list or dict in two places, which who
    changes one changes in both; attributes beside items."""
    known, seen, todo = {id(each) for each, *_ in state.tensors}, set[int](), list(values)
    while todo:
        value = todo.pop()
        inside = opened(value)
        items = [*_items(inside)]
        todo += items
        if isinstance(value, list | Mapping) and id(value) in seen:
            raise Unrecordable(
                f"The model leaves one {type(value).__name__} in two places, which a record makes two of."
            )
        seen.add(id(value))
        holds = items or isinstance(value, Tensor | Mapping | tuple | list)
        if not holds or inside is not value or id(value) in known or not has_attributes(value):
            continue
        if not {*map(id, attributes(value).values())} <= {*map(id, items)}:
            raise Unrecordable(f"The model gives a {type(value).__name__} with attributes beside what it holds.")


def _check_keys(values: Sequence[Any], keys: Sequence[Any], call: Call) -> None:
    """Raise Unrecordable where what a forward leaves stands under a key that is an object of this call."""
    todo, found = list(values), list(keys)
    for value in todo:  # grows
        inside = opened(value)
        found += inside if isinstance(inside, Mapping) else ()
        todo += _items(inside)
    objects = [each for each in found if not (plain(each) or isinstance(each, tuple | type | FunctionType | Enum))]
    given, seen = State(parameters=False, values=False), set[int]()
    given.walk([call.args, call.kwargs] if objects else [], seen)
    if of_call := [each for each in objects if id(each) in seen]:
        raise Unrecordable(f"The model puts something under a key that is a {type(of_call[0]).__name__} of this call.")


def _items(inside: Any) -> Iterable[Any]:
    return inside.values() if isinstance(inside, Mapping) else inside if isinstance(inside, tuple | list) else ()


def _same(change: Change) -> bool:
    """Whether a new object is an equal number or text."""
    equal = plain(change.value) and type(change.value) is type(change.before)
    return equal and repr(change.value) == repr(change.before) and "is gone" not in change.name


def _check_names(assigned: Assigned | None) -> None:
    """Raise Unrecordable where the model assigns what its code names in a module or class."""
    if assigned is not None and (names := assigned.names()):
        raise Unrecordable(
            f"The model assigns the global or class attribute {names[0]}, which a record of its operations does not "
            "do. Return it instead, or keep it in an attribute of the model."
        )


def _is_recordable(change: Change) -> bool:
    """Whether a record can tell of a change: tensors that an attribute or item gets, or None, which counts nothing."""
    leaves = [*leaves_of(change.value)]
    told = change.value is None or not leaves or any(isinstance(leaf, Tensor) for leaf in leaves)
    return change.owner is not None and told
