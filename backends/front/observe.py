"""Runs of a model that are only looked at: short ones that show its pattern, and one at the full length that checks it.

The model, its arguments, its Python state and the random numbers are afterwards as they were.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from reroll.backends.construct.stages.proof import Proof
from reroll.backends.construct.stages.seen import Seen
from reroll.backends.dynamo.entry import ON_META
from reroll.backends.front.calls.arguments import Call, first_steps, has_history
from reroll.backends.front.calls.counter import told
from reroll.backends.front.held.keys import sharing
from reroll.backends.front.held.outside import lent, nothing_taken
from reroll.backends.front.held.state import Change, State
from reroll.backends.processes.apart import in_silence
from reroll.backends.runtime.randomness import numpy_state, random_numbers_kept
from reroll.capture.lengths.check import Check, Departure
from reroll.capture.lengths.instantiate import TooShortError
from reroll.capture.lengths.pattern import EventTrace, Pattern, find_pattern
from reroll.capture.lengths.template import ADVICE
from reroll.capture.recorder.events import LITERALS, SIZE, Numbers, Recorder, Sink, recording
from reroll.capture.recorder.identity import holds_tensors, is_a
from reroll.capture.recorder.valueless import NeedsValues, Valueless, serves
from reroll.capture.steps.runs import LONGEST_PERIOD
from reroll.errors import LengthError, OptionError, UnsupportedError
from reroll.graph.lines import line_that_changes, user_line
from reroll.graph.nested import Place, leaves_of, places_of, tensors_of, with_leaves
from reroll.graph.private import applied_functions, parametrized_anew, parametrized_once, storage_id, version_of

Candidate = tuple[tuple[int, ...], tuple[str, ...], int]
"""Short lengths, and the other arguments of ``find_pattern``."""
SHORT = ((6, 7, 9), (16, 17, 19), (32, 33, 35))
FEWEST = 8  # steps of a sequence that can show a pattern by itself
_LONGEST_GUESS = 64  # steps of a period that is guessed: three runs of up to seven times as many
_PERIODS = 5  # of fewer rows than that no loop is made
_ROWS = 128  # rows that a slice takes, for which as many steps are looked at
_WHOLE_LOOPS = ("lstm", "gru", "rnn_tanh", "rnn_relu", "while_loop", "scan", "associative_scan")
_SOME = 64  # operations from which on their sizes say whether they are done over time
_MANY = 256  # operations from which on a loop over another dimension than time is looked for
_UNROLLED = 2_000  # operations from which on a loop is looked for before Dynamo reads the model
_SHOWING = frozenset(
    getattr(torch.Tensor, name) for name in ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy")
)
NOT_AN_OPERAND = "convert all Tensors to FakeTensors"
"""In what torch says where code that is traced reads a tensor of its own."""
_TRANSFORMS = (
    "reroll.compile: the model uses torch.func transforms, which a run that checks it cannot follow. Use "
    "torch.compile(backend='reroll') for this model."
)
_COND = (
    "reroll.compile: torch.cond compiles its branches by itself, which fails in a run that is looked at where a branch "
    "reads a parameter of the model. Hand it over among the operands of torch.cond, or choose by torch.where."
)


class OtherTimeError(LengthError):
    """What was taken for time is another dimension."""


class DrawnError(UnsupportedError):
    """The model draws from numpy's random numbers."""


class UpdatedError(UnsupportedError):
    """The model changes a parameter in place."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """A pattern that a run of the model at one length followed, and what that run returned, without its tensors."""

    pattern: Pattern
    check: Check
    skeleton: Any


def observe(
    model: Callable[..., Any],
    call: Call,
    known: Sequence[Pattern],
    unusable: Mapping[tuple[int, ...], LengthError],
    refused: dict[Candidate, LengthError],
    most: int,
) -> Observed:
    """The first pattern that a call follows: one that is known, else one found from short runs.

    unusable: lengths whose traces gave no template, and why; refused: short runs that gave no pattern, which
    is noted. most: steps of short runs, as a record of the call takes as long; the first ones are made in any case.
    Raises LengthError with the line where a pattern was left, and UnsupportedError where memory that a sequence shares
    is changed.
    """
    shared = _shared(model, call)
    versions = [version_of(value) for value in shared]
    found = _followed(model, call, known, unusable, refused, most)
    if shared and (found.pattern.changes_inputs or versions != [version_of(value) for value in shared]):
        raise UnsupportedError(
            "reroll.compile: the model changes a tensor in place that shares memory with a sequence (views of one "
            "tensor or array, among the arguments or in the model). Pass a copy of one of them (clone())."
        )
    return found


def departure(model: Callable[..., Any], call: Call, observed: Observed) -> str:
    """What a call does otherwise than another one of its length, from which nothing tells it apart; empty if all is as
    it was."""
    try:
        again = _follow(model, call, observed.pattern)
    except LengthError as error:
        return str(error).removesuffix(ADVICE).strip()
    return "" if again.check.values == observed.check.values else "A number of the model's is another one."


def _shared(model: Callable[..., Any], call: Call) -> list[torch.Tensor]:
    """Sequences that share memory with other tensors or with numpy's arrays, and those tensors.

    Raises UnsupportedError for sparse tensors, which share none that could be told.
    """
    state = refuse_sparse(model, call)
    values = [*(value for value, _, _ in state.tensors), *(array for array, _ in state.arrays)]
    groups = [[values[number] for number in group] for group in sharing(values)]
    found = [value for group in groups if any(id(each) in call.dims for each in group) for value in group]
    return [value for value in found if isinstance(value, torch.Tensor)]


def refuse_sparse(model: Callable[..., Any], call: Call) -> State:
    """What a call can reach. Raises UnsupportedError if a sparse tensor is among it, or one without values."""
    state = State.of(model, call.args, call.kwargs, parameters=False, values=False)
    if any(value.layout is not torch.strided for value, _, _ in state.tensors):
        raise UnsupportedError(
            "reroll.compile: the model holds or is given a sparse tensor, which Dynamo does not read and a record of "
            "its operations does not tell. Use a dense one (to_dense()), or the plain model."
        )
    if any(value.is_meta for value, _, _ in state.tensors):
        raise UnsupportedError(f"reroll.compile: {ON_META}")
    return state


def _followed(
    model: Callable[..., Any],
    call: Call,
    known: Sequence[Pattern],
    unusable: Mapping[tuple[int, ...], LengthError],
    refused: dict[Candidate, LengthError],
    most: int,
) -> Observed:
    refusals = [*unusable.values(), *refused.values()]
    tried = {pattern.lengths for pattern in known} | set(unusable)
    candidates = chain(_candidates(call.length), _guesses(call.length, refusals))
    left = most - sum(map(sum, unusable)) - sum(sum(lengths) for lengths, *_ in refused)
    fresh = (each for each in candidates if each[0] not in tried and each not in refused)
    for each in chain[Pattern | Candidate](known, fresh):
        if not isinstance(each, Pattern):
            left -= sum(each[0])
            if left < 0 and refusals:
                break
        try:
            return _follow(model, call, each if isinstance(each, Pattern) else probe(model, call, *each))
        except LengthError as error:
            if isinstance(error, TooShortError) and error.rows is None and call.length < FEWEST:
                raise
            refusals.append(_without_frames(error))
            if not isinstance(each, Pattern):
                refused[each] = error
            if sum(isinstance(each, OtherTimeError) for each in refusals) == len(SHORT):
                break  # more lengths would say the same
    few = [error for error in refusals if isinstance(error, TooShortError) and call.length <= SHORT[0][-1]]
    raise (few or refusals)[0]


def refuse_unrolled(model: Callable[..., Any], call: Call) -> None:
    """Refuse a loop of many steps over something else than time, before Dynamo unrolls it, which takes long.

    Raises OtherTimeError or OptionError where runs of several short lengths do the same many operations.
    """
    refusals = list[LengthError]()
    for lengths in SHORT[:2]:
        palette: dict[Any, int] = {}
        traces = list[EventTrace]()
        with suppress(Exception):  # what cannot be run so is looked at later, and told then
            while len(traces) < 2 and (not traces or len(traces[0].colours) > _UNROLLED):
                traces.append(_traced(model, call, lengths[len(traces)], palette)[0])
        if len(traces) < 2 or len(traces[0].colours) != len(traces[1].colours) or _has_whole_loops(palette):
            return
        try:
            _refuse_other_time(model, call, len(traces[0].colours))
            _refuse_sizes(call, traces)
        except OtherTimeError as error:
            refusals.append(error)
        else:
            return
    raise refusals[0]


def _without_frames(error: LengthError) -> LengthError:
    """An error that does not keep what was there when it was raised alive."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def _candidates(length: int) -> Iterator[Candidate]:
    """Short lengths to look at: any three, or three that leave the same rest as ``length`` for a period, with the other
    arguments of ``find_pattern``.

    The fewest steps come first, counted twice where a period has its own. Numbers that are no affine function of step
    and length are taken for free last: most often they have a period.
    """
    found = [(lengths, 1) for lengths in SHORT]
    if FEWEST <= length < SHORT[0][-1]:  # a table may have as many rows as there are steps
        found.append(((length - 3, length - 2, length), 1))
    for period in range(2, LONGEST_PERIOD + 1):
        found += [(_periodic(length, period), multiple) for multiple in (1, period)]
    found.sort(key=lambda each: sum(each[0]) * min(each[1], 2))
    for free in (("float",), LITERALS):
        yield from ((lengths, free, multiple) for lengths, multiple in found)


def _periodic(length: int, period: int) -> tuple[int, int, int]:
    """Three lengths that leave the same rest as ``length`` for a period, and have enough of these."""
    first = max(_PERIODS * period, FEWEST)
    first += (length - first) % period
    return first, first + period, first + 3 * period


def _guesses(length: int, refusals: Sequence[LengthError]) -> Iterator[Candidate]:
    """Candidates with longer periods, of which the steps tell at which the run of the call left a pattern."""
    for rows in sorted({error.rows for error in refusals if error.rows and error.rows <= min(_ROWS, length // 2)}):
        yield (rows + 2, rows + 3, rows + 5), ("float",), 1  # a slice of so many takes less than all there
    left = {period for error in refusals for period in (error.steps, error.steps + 1)}
    for period in sorted(each for each in left if LONGEST_PERIOD < each <= min(_LONGEST_GUESS, length // 2)):
        for multiple in (1, period):
            yield _periodic(length, period), ("float",), multiple


def probe(
    model: Callable[..., Any], call: Call, lengths: Sequence[int], free: tuple[str, ...], multiple: int
) -> Pattern:
    """The pattern of runs at short lengths, as ``find_pattern`` finds it. Raises LengthError if there is none."""
    palette: dict[Any, int] = {}
    traces, changes = [], False
    for length in lengths:
        try:
            trace, changed = _traced(model, call, length, palette)
        except UnsupportedError:
            raise
        except Exception as error:
            raise _not_run(model, call, length, error) from error
        changes = changes or changed
        traces.append(trace)
        operations = len(trace.colours)
        if len(traces) == 2:
            _refuse_growing_lists(model, call, traces)
        if len(traces) == 2 and operations == len(traces[0].colours) and not _has_whole_loops(palette):
            _refuse_other_time(model, call, operations)
            _refuse_sizes(call, traces)
    try:
        pattern = replace(find_pattern(traces, palette, free, multiple), changes_inputs=changes)
    except LengthError as error:
        raise _of_each_step(traces, palette) or error from None
    _refuse_attributes(model, call, pattern)
    return pattern


def _not_run(model: Callable[..., Any], call: Call, length: int, error: Exception) -> UnsupportedError | LengthError:
    """What is said of a model that runs on all steps but not on a few, where it raised an error. Raises that of all."""
    _run_plainly(model, call)
    if "torch.func" in str(error) and "saved tensor hooks" in str(error):
        return UnsupportedError(_TRANSFORMS)
    if isinstance(error, AssertionError) and NOT_AN_OPERAND in str(error):
        return UnsupportedError(_COND)
    return LengthError(
        f"The model cannot be run on {length} steps: {type(error).__name__}: {error}. If these are no steps, "
        "say in time_dim which arguments have time, in which dimension. If a table in it has a row for each "
        "step, give it more rows, or use torch.compile(backend='reroll')."
    )


def _of_each_step(traces: Sequence[EventTrace], palette: Mapping[Any, int]) -> LengthError | None:
    """What is said of a model that reads more tensors of its own the more steps there are; None of any other."""
    colours = {number: list(filter(_is_state, colour)) for colour, number in palette.items()}
    reads = [{item: at for at, number in enumerate(t.colours) for item in colours[number]} for t in traces]
    more = [at for item, at in reads[-1].items() if all(item not in read for read in reads[:-1])]
    if not more or len(reads[0]) == len(reads[1]):
        return None
    return LengthError(
        f"In a run of {traces[-1].length} steps the model reads parameters or buffers that it does not read in one of "
        f"{traces[-2].length}, first at {traces[-1].lines[more[0]]}. Steps with parameters of their own have no code "
        "that serves every length. Leave out time_dim: reroll.compile(model) rolls them as blocks, anew for each "
        "length."
    )


def _is_state(item: Any) -> bool:
    """Whether an item of a colour is a tensor that the model holds."""
    return isinstance(item, tuple) and item[:1] == ("from outside",) and str(item[1]).startswith("state ")


def _traced(model: Callable[..., Any], call: Call, length: int, palette: dict[Any, int]) -> tuple[EventTrace, bool]:
    """The trace of a run on the first steps, and whether it changed a sequence in place."""
    short, _ = call.resized(length, first_steps)
    trace = EventTrace(length, [], [], [], {})

    def note(colour: tuple[Any, ...], numbers: Numbers) -> None:
        trace.colours.append(palette.setdefault(colour, len(palette)))
        trace.numbers.append(numbers)
        trace.lines.append(user_line())

    sequences = [value for value in tensors_of((short.args, short.kwargs)) if id(value) in short.dims]
    versions = [version_of(value) for value in sequences]
    with looked_at(model, short, frozenset(), parameters=True) as state, nothing_taken():
        given, recorder = _run(model, short, note, state, short=True)[1:]
        trace.given.update(given)
        trace.sizes.extend(recorder.sizes)
        added = sum(map(_is_added, state.changes()))
    return replace(trace, added=added), versions != [version_of(value) for value in sequences]


def _refuse_growing_lists(model: Callable[..., Any], call: Call, traces: Sequence[EventTrace]) -> None:
    """Refuse a model that adds values of its steps to a list that was there before."""
    if len({trace.added for trace in traces}) > 1:
        line = line_that_leaves(model, call, _is_added)
        raise UnsupportedError(
            f"reroll.compile: the model, or a hook of it, adds values of its steps to a list that is there before the "
            f"call ({traces[0].added} tensors in a run of {traces[0].length} steps), at {line}, which a compiled loop "
            "does not fill. Return the values from the forward, or use torch.compile(backend='reroll')."
        )


class _Shown(TorchFunctionMode):
    """Notes the first line of the user's code that is shown values."""

    line = ""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SHOWING and not self.line:
            self.line = user_line()
        return func(*args, **(kwargs or {}))


def why_it_differs(model: Callable[..., Any], call: Call) -> str:
    """What may have a model do other things from run to run, with its line: Python's random numbers, or values."""
    short, _ = call.resized(SHORT[0][0], first_steps)
    shown, before = _Shown(), random.getstate()
    with suppress(Exception), looked_at(model, short, frozenset(), parameters=True):
        line = line_that_changes(lambda: random.getstate() != before, partial(short.run, model))
        if random.getstate() != before:
            return (
                f" It draws from Python's random at {line}. Draw from torch, and choose without Python: "
                "torch.where(torch.rand(()) < p, a, b)."
            )
        with shown:
            short.run(model)
    if not shown.line:
        return ""
    return f" It looks at values at {shown.line}. Choose without Python: torch.where(condition, a, b)."


def _is_named(name: str, change: Change) -> bool:
    return change.name == name


def _is_added(change: Change) -> bool:
    return change.owner is None and is_a(change.value, torch.Tensor)


def line_that_leaves(model: Callable[..., Any], call: Call, wanted: Callable[[Change], bool]) -> str:
    """The line of the user's code that changes something which can be reached from a model, in a run of few steps."""
    short, _ = call.resized(SHORT[0][0], first_steps)
    with looked_at(model, short, frozenset(), parameters=True) as state:
        return line_that_changes(lambda: any(map(wanted, state.changes())), partial(short.run, model))


def _has_whole_loops(palette: Mapping[Any, int]) -> bool:
    """Whether one of the operations is a loop over time by itself, so that their number does not tell of time."""
    return any(getattr(colour[0], "__name__", str(colour[0])) in _WHOLE_LOOPS for colour in palette)


def _refuse_other_time(model: Callable[..., Any], call: Call, operations: int) -> None:
    """Refuse a model that does as many operations whatever its number of steps, if something else says how many.

    Its loop would be unrolled, which takes as long as what reroll is there to avoid.
    """
    if call.counter is not None:
        raise OptionError(
            f"reroll.compile: steps={call.counter.name!r}, but the model does {operations:,} operations whatever that "
            f"number is.{told(model)}"
        )
    if operations <= _MANY:
        return
    for dim in range(max(value.dim() for value in tensors_of((call.args, call.kwargs)) if id(value) in call.dims)):
        other = call.along(dim)
        if other is None:
            continue
        few = more = 0
        with suppress(Exception):  # of sizes that the model is not made for
            few, more = (len(_traced(model, other, length, {})[0].colours) for length in SHORT[0][:2])
        if more > few and few + (other.length - SHORT[0][0]) * (more - few) == operations:
            raise OptionError(
                f"reroll.compile: time_dim names {call.shapes()}, but the model does {operations:,} operations "
                f"whatever the length of that, and {more - few} for each step of {other.shapes()}. Give time_dim={dim} "
                "(or that dimension by name). If its loop is not over time, use torch.compile(backend='reroll')."
            )


def _refuse_sizes(call: Call, traces: Sequence[EventTrace]) -> None:
    """Refuse a model of many operations, as many at two lengths, most of which make values as long as these."""
    operations, sizes = len(traces[0].colours), zip(*(trace.sizes for trace in traces), strict=True)
    if operations > _SOME and 2 * sum(one != other for one, other in sizes) > operations:
        raise OtherTimeError(
            f"The model does {operations:,} operations whatever the length of {call.shapes()}, and most of them make "
            "values of that length: its loop, if it has one, is over something else. If that is no dimension of time, "
            "say in time_dim which is. Without time_dim reroll.compile rolls blocks over depth."
        )


def _run_plainly(model: Callable[..., Any], call: Call) -> None:
    """Run the model as it is, so that an error of its own is raised as such."""
    with looked_at(model, call, frozenset(call.dims), parameters=False), torch.no_grad():
        call.run(model)


def other_size(model: Callable[..., Any], call: Call) -> Call | None:
    """The call with another size in a dimension beside time, if the model runs at one: a few steps of it are run."""
    for other in call.other_sizes():
        short, _ = other.resized(SHORT[0][0], first_steps)
        with suppress(Exception), looked_at(model, short, frozenset(), parameters=True), torch.no_grad():
            short.run(model)
            return other
    return None


def _follow(model: Callable[..., Any], call: Call, pattern: Pattern) -> Observed:
    """Run a call along a pattern: without values where none is asked for, which takes a part of the time. What is found
    to be wrong in such a run is looked at with values."""
    if serves(pattern.palette):
        with suppress(Exception, NeedsValues):
            return _run_along(model, call, pattern, valueless=True)
    return _run_along(model, call, pattern, valueless=False)


def _run_along(model: Callable[..., Any], call: Call, pattern: Pattern, *, valueless: bool) -> Observed:
    check = Check(pattern, call.length, user_line)
    if not check.possible:
        raise TooShortError(f"{call.length} steps are fewer than the first and last ones that differ from the others.")
    try:
        if pattern.changes_inputs:
            call, _ = call.resized(call.length, lambda value, dim, length: value.detach().clone())
        with looked_at(model, call, frozenset(call.dims), parameters=False) as state:
            without = _without_values(state, call) if valueless else None
            result, *_ = _run(model, call, check.see, state, valueless=without)
        check.finish()
        if without is not None and without.asked:
            raise NeedsValues
    except Departure as departure:
        longer = call.length > pattern.lengths[0]
        error = LengthError(f"{departure} {ADVICE}") if longer else TooShortError(str(departure))
        error.steps, error.rows = check.run, check.rows
        raise error from None
    return Observed(pattern, check, with_leaves(lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf, result))


def _named(state: State) -> Iterator[Any]:
    """What objects and variables of functions hold, and what functions name, as it is or in a module."""
    yield from (each for owner, held in state.objects for each in (owner, *held.values()))
    yield from (content for _, content in state.cells)
    for function in (each for each in state.code if isinstance(each, types.FunctionType)):
        names = function.__code__.co_names
        for value in (function.__globals__.get(name) for name in names):
            yield value
            if is_a(value, types.ModuleType):
                yield from (vars(value).get(name) for name in names)


def _without_values(state: State, call: Call) -> Valueless:
    """What gives results without values, in a run of a model in some state. Raises NeedsValues where that calls
    functions of TorchScript: these are no operations, and may read values unseen."""
    if any(is_a(each, torch.jit.ScriptFunction | torch.jit.ScriptModule) for each in _named(state)):
        raise NeedsValues
    tensors = [*(value for value, _, _ in state.tensors), *tensors_of((call.args, call.kwargs))]
    return Valueless(frozenset(storage_id(each) for each in tensors if each.layout == torch.strided))


def _run(
    model: Callable[..., Any],
    call: Call,
    sink: Sink,
    state: State,
    *,
    short: bool = False,
    valueless: Valueless | None = None,
) -> tuple[Any, dict[tuple[Any, ...], int | None], Recorder]:
    """What the model returns, the event that made each of the tensors in it, by their place, and what recorded it.

    Raises DrawnError if it draws from numpy's random numbers, or from a generator that it holds.
    """
    recorder, before = Recorder(sink, tensor_names(state) | call.names(), short, valueless), numpy_state()
    with recording(recorder):
        result = call.run(model)
        if numpy_state() != before or state.moved_on():
            raise _drawn(model, call, state, before)
        _refuse_objects(result)
        recorder.give("result", result)
        for change in state.changes():
            recorder.give(change.name, change.value)
        for _, name, value in state.assigned.flags() if state.assigned is not None else ():
            recorder.give(f"global {name}", value)
    return result, {place: recorder.event_of(value) for place, value in places_of(result)}, recorder


def _drawn(model: Callable[..., Any], call: Call, state: State, before: Any) -> DrawnError:
    """What is said of a model that draws from numpy's random numbers, as they were before, or moves an object on."""
    name = state.moved_on()
    state.restore()
    line = line_that_changes(
        lambda: numpy_state() != before if name is None else state.moved_on() is not None, partial(call.run, model)
    )
    if name is None:
        return DrawnError(
            f"reroll.compile: the model draws from numpy's random numbers at {line}, in whose place torch.compile "
            "would draw others. Draw from torch's (torch.rand, torch.randn), or draw before the call and pass what was "
            "drawn."
        )
    return DrawnError(
        f"reroll.compile: the model draws or reads from an object that it holds ({name}) at {line}, which changes what "
        "the object gives next: a compiled model would not. Draw or read before the call and pass what was drawn, or "
        "draw from torch's random numbers (torch.rand, torch.randn)."
    )


def tensor_names(state: State) -> dict[int, str]:
    """A name of every tensor of the model's state, by its identity: another state has other tensors in its places."""
    owners = [*state.objects, *state.containers, *((cell, {"": content}) for cell, content in state.cells)]
    return {
        id(tensor): f"state {number} {place}"
        for number, (_, content) in reversed(list(enumerate(owners)))
        for place, tensor in _held_in(content if is_a(content, dict) else dict(enumerate(content)))
    }


def _held_in(content: Mapping[Any, Any]) -> Iterator[tuple[Place, torch.Tensor]]:
    """The tensors in what an object or container holds, and in tuples there; what else holds some has its own names."""
    for key, value in content.items():
        if is_a(value, torch.Tensor):
            yield (key,), value
        elif is_a(value, tuple):
            yield from (((key, *place), tensor) for place, tensor in _held_in(dict(enumerate(value))))


@contextmanager
def looked_at(
    model: Callable[..., Any],
    call: Call,
    untouched: frozenset[int],
    *,
    parameters: bool,
    ran: Sequence[types.FunctionType] = (),
) -> Iterator[State]:
    """Put back what the model changes; ``untouched`` are tensors that it is known not to change, ``ran`` functions of
    which is known that they run in it.

    Raises UnsupportedError if it changes a parameter, takes from an iterator that its code names, or speaks with other
    processes.
    """
    state = State.of(model, call.args, call.kwargs, parameters=parameters, untouched=untouched, ran=ran)
    try:
        with random_numbers_kept(), in_silence(), parametrized_anew(), lent(state.iterators):
            yield state
        if state.changed_parameter():
            raise UpdatedError(
                "reroll.compile: the model changes a parameter in place in its forward. Use "
                "torch.compile(backend='reroll') for it."
            )
    finally:
        state.restore()


def shown_by(
    model: Callable[..., Any],
    call: Call,
    untouched: frozenset[int],
    proof: Proof,
    run: Callable[[Callable[..., Any]], Any],
    *,
    plainly: bool = False,
    apart: Mapping[int, torch.Tensor],
) -> Seen:
    """What a call shows: its result, gradients for the proof's incoming ones, and what it leaves changed. ``apart``:
    the leaves that stand behind arguments, by the identity of these. In the plain run, which ends no turn, checkpoints
    of torch's that are reentrant run at once, as they give no gradients of chosen leaves."""
    at_once = applied_functions(lambda _, inner, args, kwargs: inner(*args, **kwargs)) if plainly else nullcontext()
    with looked_at(model, call, untouched, parameters=False) as state, at_once:
        reached = [*(value for value, _, _ in state.tensors), *tensors_of((call.args, call.kwargs))]
        reached = [apart.get(id(value), value) for value in reached]
        leaves = {value: name for name, value in named_tensors(model, reached) if value.requires_grad and value.is_leaf}
        seen = proof.seen(lambda: run(model), leaves, reached if plainly else None)
        note_state(seen, state, leaves)
    return seen


def holds_history(model: Callable[..., Any]) -> bool:
    """Whether a model holds a tensor whose gradient would go on to what it was made of, or torch holds one for it."""
    return parametrized_once() or any(
        has_history(value) for value, _, _ in State.of(model, parameters=False, values=False).tensors
    )


def named_tensors(model: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a call reaches, each once: parameters by their names, others by their numbers."""
    named = {id(value): name for name, value in model.named_parameters()} if isinstance(model, torch.nn.Module) else {}
    for number, value in enumerate({id(each): each for each in tensors}.values()):
        yield named.get(id(value), f"tensor {number}"), value


def note_state(seen: Seen, state: State, leaves: Mapping[torch.Tensor, str]) -> None:
    """Tensors that can be reached from the model and its inputs, and what the call made of attributes."""
    for number, (value, version, kept) in enumerate(state.tensors):
        if kept is not None and not (isinstance(value, torch.nn.Parameter) and version_of(value) == version):
            seen.tensors[f"afterwards {leaves.get(value, f'tensor {number}')}"] = value.detach().clone()
    for name, value, *_ in state.changes():
        if isinstance(value, torch.Tensor):
            seen.tensors[f"attribute {name}"] = value.detach().clone()
        elif isinstance(value, bool | int | float | str | type(None)):
            seen.others[f"attribute {name}"] = value


def _refuse_objects(result: Any) -> None:
    """Refuse a result that holds tensors where they cannot be put at another length."""
    for leaf in leaves_of(result):
        if not isinstance(leaf, torch.Tensor) and holds_tensors(leaf):
            name = type(leaf).__name__
            raise UnsupportedError(
                f"reroll.compile: the model returns an object that holds tensors ({name}), which may also keep what "
                "depends on the number of steps. Return its tensors in a tuple, list, dict or dataclass, and make the "
                f"{name} of them outside of the model; or use torch.compile(backend='reroll')."
            )


def _refuse_attributes(model: Callable[..., Any], call: Call, pattern: Pattern) -> None:
    """Refuse models that leave something in an attribute that Dynamo would fill from a short trace."""
    names = {number: colour for colour, number in pattern.palette.items()}
    for slot in (slot for stretch in pattern.stretches for slot in stretch.slots):
        colour = names[slot.colour]
        given = next((x for x in colour if isinstance(x, str) and x.startswith("gives ")), "gives result")
        forms = (*slot.head, *slot.tail, slot.middle)
        moves = any(
            form.c[i] or i in form.free
            for form in forms
            for i, kind in enumerate(slot.kinds)
            if kind not in ("made", SIZE)
        )
        inputs = any(isinstance(x, tuple) and str(x[1:2]).startswith("('argument") for x in colour)
        if given != "gives result" and (moves or inputs):
            name = given.removeprefix("gives ")
            line = line_that_leaves(model, call, partial(_is_named, name))
            raise LengthError(
                f"The model leaves in {name.lstrip('0123456789 ')} what depends on the number of steps (a number, a "
                f"list that grows, or its input), at {line}. Return it instead, do that outside of the forward, or use "
                "torch.compile(backend='reroll')."
            )
