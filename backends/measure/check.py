"""``reroll.check``: one call of a model, plainly and compiled, compared in everything that a user can see."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reroll.backends.construct.stages.proof import say_refused
from reroll.backends.construct.stages.seen import (
    EXACT,
    FOLLOWING,
    TOLERANCE,
    Difference,
    Rounding,
    Seen,
    compared,
    distance,
    following,
    note_result,
    rounding_of,
)
from reroll.backends.construct.stages.takeover import aside
from reroll.backends.front.observe import note_state
from reroll.backends.front.python_state.state import State
from reroll.backends.measure.explain import explain, model_of
from reroll.backends.measure.measure import Measurement, measured
from reroll.backends.measure.plain import mean_squares, named_leaves
from reroll.backends.runtime.randomness import random_numbers_kept
from reroll.errors import DifferenceError, RerollError, UnsupportedError
from reroll.graph.nested import places_of
from reroll.graph.private import saved_as_copies, was_updated
from reroll.words.units import nbytes_text, seconds_text


@dataclass(frozen=True, slots=True)
class Check:
    """What ``reroll.check`` found.

    ``differences``: all that is not equal. ``error``: the largest difference of a number, relative to the largest entry
    of its tensor. ``plain``, ``compiled``: what a training step took, in bytes and seconds; None if not measured.
    """

    differences: tuple[Difference, ...]
    error: float
    plain: Measurement | None = None
    compiled: Measurement | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return not self.differences

    def __str__(self) -> str:
        lines = [self._headline(), *(f"  {each}" for each in self.differences)]
        for name, cost in (("plain", self.plain), ("compiled", self.compiled)):
            if cost is not None:
                lines.append(
                    f"  {name}: local peak {nbytes_text(cost.local_peak)}, {seconds_text(cost.seconds)} of CPU"
                )
        return "\n".join(lines)

    def _headline(self) -> str:
        found = f"equal to {self.error:.0e}" if self.error else "equal to the bit"
        found = found if self.equal else f"DIFFERENT in {len(self.differences)} places"
        if self.plain is None or self.compiled is None:
            return found
        memory = _times(self.plain.local_peak, self.compiled.local_peak, "less memory", "more memory")
        speed = _times(self.plain.wall_seconds, self.compiled.wall_seconds, "faster", "slower")
        return f"{found}, {memory}, {speed}"


@aside()
def check(
    model: Any,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    strict: bool = False,
    measure: bool = True,
    **kwargs: Any,
) -> Check:
    """Run a training step plainly and compiled, on the same inputs and seed, and compare what can be seen of it.

    model: what ``reroll.compile`` or ``torch.compile`` returned; anything else is compiled with the backend "reroll".
    inputs, kwargs: those of a call. loss: from the model's result to a number; without one the mean square of each
    tensor in the result. tolerance: the largest difference allowed, relative to the largest entry of each tensor;
    by default 1e-10 of float64, 1e-4 of float32, 0.02 of shorter numbers, and of loops that compute in these; of a
    gradient that is a thousand times smaller than the largest one, relative to a thousandth of that. A spike that
    flips is a difference of 1: compare spiking networks in float64, or on inputs away from thresholds. Inductor
    draws other random numbers than torch: compare dropout with ``lowering="eager"``. measure: also local peaks and
    seconds, which takes two more steps of each.

    Compared are results (types, values, shapes, dtypes, what requires a gradient, layouts, but that what is expanded
    may be written out, and a part of something larger be dense), gradients of parameters and inputs (which are None,
    too), buffers, attributes and inputs that the call changes, and the random numbers that follow it. Inputs,
    parameters, gradients, buffers, attributes of modules and random numbers are afterwards as they were. With
    ``strict`` raises DifferenceError, which names the first difference.
    """
    _refuse_truncated(model)
    compiled, plain = _compiled(model), model_of(model)
    call = _Call(plain, inputs, kwargs, loss or mean_squares, seed)
    expected, actual = call.seen(plain), call.seen(compiled)
    differences, error = compared(expected, actual, tolerance)
    if differences and tolerance is None:
        differences, error = compared(expected, actual, None, _rounding(compiled, inputs, kwargs))
    if differences and strict:
        count, first = len(differences), differences[0]
        raise DifferenceError(
            f"The compiled model differs from the plain one in {count} places; the first is {first}. "
            "reroll.check(...) without strict=True lists all. Please report it, with the model."
        )
    costs = (call.cost(plain), call.cost(compiled)) if measure else (None, None)
    return Check(tuple(differences), error, *costs)


def _refuse_truncated(model: Any) -> None:
    """Raise UnsupportedError for a model whose gradients are not to be those of plain autograd."""
    options = getattr(getattr(model, "reroll_caller", None), "options", None)
    if options is not None and options.truncate is not None:
        raise UnsupportedError(
            f"reroll.check compares with plain autograd, and the model was compiled with truncate={options.truncate}, "
            "which cuts gradients. Check it without truncate."
        )


def _rounding(compiled: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Rounding:
    """What rounding explains of what loops give: they may compute in half precision, as under autocast."""
    try:
        found = explain(compiled, *inputs, **kwargs)
    except RerollError:
        return EXACT
    reports = (found, *found.others)
    loops = (loop.captured or loop.recurrence for each in reports for loop in each.loops)
    return rounding_of(loops, [each.outer for each in reports])


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="reroll") if model_of(model) is model else model


class _Call:
    """A training step that can be run any number of times, and leaves nothing behind."""

    def __init__(self, plain: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any], loss: Any, seed: int) -> None:
        self.plain, self.inputs, self.kwargs, self.loss, self.seed = plain, inputs, kwargs, loss, seed
        self.leaves = dict(named_leaves(plain, inputs, kwargs))
        self.refused = set[int]()  # models that torch does not go backward through as they are

    def seen(self, model: Any) -> Seen:
        """What a step of the plain or of the compiled model shows. Where torch refuses to go backward through the plain
        one after an update in place, it saves copies of what is updated."""
        try:
            return self._seen(model)
        except RuntimeError as error:
            if not was_updated(error) or (model is not self.plain and id(self.plain) not in self.refused):
                raise
            self.refused.add(id(model))
            if model is self.plain:
                say_refused(str(error))
            return self._seen(model)

    def _seen(self, model: Any) -> Seen:
        state = State.of(self.plain, self.inputs, self.kwargs, parameters=True)
        seen = Seen()
        try:
            with random_numbers_kept():
                result, grads = self._step(model)
                seen.others[FOLLOWING] = following()
            note_result(seen, result)
            seen.gradients = dict(zip(self.leaves.values(), grads, strict=True))
            note_state(seen, state, self.leaves)
        finally:
            state.restore()
        return seen

    def cost(self, model: Any) -> Measurement:
        """What a step takes, without the memory of its gradients."""
        state = State.of(self.plain, self.inputs, self.kwargs, parameters=True)

        def step() -> Any:
            state.restore()  # before it: what this allocates is gone when the step begins
            return self._step(model)

        try:
            with random_numbers_kept():
                return measured(step, lambda made: [grad for grad in made[1] if grad is not None])
        finally:
            state.restore()

    def _step(self, model: Any) -> tuple[Any, list[Tensor | None]]:
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)  # noqa: NPY002  # the state that users share
        with saved_as_copies() if id(model) in self.refused else nullcontext():
            result = model(*self.inputs, **self.kwargs)
            if not self.leaves or not any(each.requires_grad for _, each in places_of(result)):
                return result, [None] * len(self.leaves)
            return result, list(torch.autograd.grad(self.loss(result), list(self.leaves), allow_unused=True))


def _times(before: float, after: float, better: str, worse: str) -> str:
    """By how much one number is below another, in words."""
    if not before or not after:
        return f"no {better} to tell"
    return f"{before / after:.1f} times {better}" if after <= before else f"{after / before:.1f} times {worse}"


__all__ = ["TOLERANCE", "Check", "Difference", "check", "distance"]
