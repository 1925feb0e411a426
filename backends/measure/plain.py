"""A training step, plain and compiled: its leaves, a loss, and what it takes, from runs on a few of its steps."""

from __future__ import annotations

import io
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reroll.backends.front.calls.arguments import Call, find_time, first_steps
from reroll.backends.front.compile import Caller
from reroll.backends.front.held.state import State
from reroll.backends.front.observe import looked_at, named_tensors
from reroll.backends.measure.measure import settle
from reroll.errors import UnsupportedError
from reroll.graph.nested import places_of, tensors_of
from reroll.graph.private import versions_kept
from reroll.planning.options import parse_budget

_LENGTHS = (32, 96)
_PARTS = (8, 2)  # of a sequence that is not much longer
_FEWEST = 8  # steps
_ROUNDS = 3
_KNOWN: weakref.WeakKeyDictionary[Caller, dict[Any, Seconds]] = weakref.WeakKeyDictionary()


class Seconds(NamedTuple):
    """CPU seconds of a training step, in plain PyTorch and compiled; None where they cannot be told from few steps."""

    plain: float | None
    compiled: float | None


def step_seconds(caller: Caller, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Seconds:
    """CPU seconds of a training step: those of two short sequences, continued to the length of this one. The plain and
    the compiled one run in turns, so that what else the machine does slows both.

    The loss is the mean square of the results. What the model changes is put back, and what it says is not heard. It
    runs once for inputs of the same shapes. None if the sequence is short itself, if nothing needs a gradient, or if
    the model does not run on so few steps; compiled also if the budget is a fraction: a part of what few steps hold may
    ask for shorter segments, which would be compiled for this alone.
    """
    call = find_time(caller.model, caller.signature, caller.time, inputs, kwargs)
    if call.length < _FEWEST * _PARTS[0] or not torch.is_grad_enabled():
        return Seconds(None, None)
    known = _KNOWN.setdefault(caller, {})
    key = call.length, tuple((place, value.shape) for place, value in places_of((inputs, kwargs)))
    if key not in known:
        alike = not isinstance(parse_budget(caller.options.memory_budget), float)
        runs: list[Callable[..., Any]] = [caller.model, caller] if alike else [caller.model]
        known[key] = Seconds(*(*_continued(caller.model, runs, call), None)[:2])
    return known[key]


def _continued(model: Callable[..., Any], runs: Sequence[Callable[..., Any]], call: Call) -> list[float | None]:
    """Seconds of ``runs``, which are the model, or do as it does. None for one that fails, or where more steps took
    less time."""
    few, more = (min(length, call.length // part) for length, part in zip(_LENGTHS, _PARTS, strict=True))
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        short, longer = (_seconds(model, runs, call, length) for length in (few, more))
    return [
        b + (call.length - more) * (b - a) / (more - few) if a is not None and b is not None and b >= a else None
        for a, b in zip(short, longer, strict=True)
    ]


def _seconds(
    model: Callable[..., Any], runs: Sequence[Callable[..., Any]], call: Call, length: int
) -> list[float | None]:
    """The least that each takes in some rounds, in which they take turns, behind one that does not count."""
    taken: list[list[float]] = [[] for _ in runs]
    for done in range(1 + _ROUNDS):
        for run, times in zip(runs, taken, strict=True):
            if len(times) == done:  # else it has failed
                with suppress(Exception):  # errors of lengths that the model is not made for
                    times.append(_step(model, run, call, length))
    return [min(times[1:]) if len(times) > _ROUNDS else None for times in taken]


def _step(model: Callable[..., Any], run: Callable[..., Any], call: Call, length: int) -> float:
    part, _ = call.resized(length, first_steps)
    leaves = [leaf for leaf, _ in named_leaves(model, part.args, part.kwargs)]
    if not leaves:
        raise UnsupportedError("The model has nothing that a gradient is for.")

    def step() -> None:
        torch.autograd.grad(mean_squares(part.run(run)), leaves, allow_unused=True)

    reached = (value for value, *_ in State.of(model, part.args, part.kwargs, parameters=False, values=False).tensors)
    buffers = tuple(each for each in reached if each.is_leaf and not each.requires_grad and not each.is_inference())
    with versions_kept(buffers), looked_at(model, part, frozenset(), parameters=True):
        return cpu_seconds_of(step)


def cpu_seconds_of(step: Callable[[], object]) -> float:
    """CPU seconds of one call, of all threads of the process; they include what is waited for a CUDA device."""
    before = time.process_time()
    step()
    settle()
    return time.process_time() - before


def named_leaves(model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, str]]:
    """The tensors that gradients are for, and their names."""
    state = State.of(model, inputs, kwargs, parameters=False, values=False)
    for name, tensor in named_tensors(model, [tensor for tensor, _, _ in state.tensors]):
        if tensor.requires_grad and tensor.is_leaf:
            yield tensor, name


def mean_squares(result: Any) -> Tensor:
    """The mean square of each tensor in a model's result, added up."""
    values = [value for value in tensors_of(result) if value.requires_grad]
    if not values:
        raise UnsupportedError(
            "The model's result needs no gradient, so there is none to compare. Give a loss that does."
        )
    return torch.stack([value.abs().square().mean() for value in values]).sum()
