"""``reroll.check``: one call of a model, plainly and compiled, compared in everything that a user can see."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reroll.backends.front.held.state import State
from reroll.backends.measure.explain import explain, model_of
from reroll.backends.measure.measure import Measurement, measured
from reroll.backends.measure.plain import mean_squares, named_leaves
from reroll.backends.runtime.randomness import random_numbers_kept
from reroll.errors import DifferenceError, RerollError, UnsupportedError
from reroll.graph.nested import places_of, structure_of
from reroll.graph.private import version_of
from reroll.words.units import nbytes_text, seconds_text

TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
"""The largest difference that rounding explains, relative to the largest entry of a tensor; 0.02 of shorter numbers."""
_SHORT = 0.02
_NOISE = (
    1e-3  # a gradient that is this small beside the largest is what rounding leaves of zero: it is measured by that
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Something of the compiled call that is not as it is in the plain one: its ``name``, and ``what`` differs.

    ``error``: how far the numbers of a tensor are off, relative to its largest entry; None where it is no number that
    differs.
    """

    name: str
    what: str
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


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


Layout = tuple[tuple[int, int], ...]
"""Size and stride of each dimension that has a second entry."""


@dataclass
class _Seen:
    """All that one call shows, by name. ``tensors`` are copies; ``layouts`` sizes and strides; ``others`` are compared
    by ``==``."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


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
    differences, error = _compared(expected, actual, tolerance)
    if differences and tolerance is None and _is_short(compiled, inputs, kwargs):
        differences, error = _compared(expected, actual, _SHORT)
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


def _is_short(compiled: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a loop computes in half precision, as under autocast, whatever it gives."""
    try:
        found = explain(compiled, *inputs, **kwargs)
    except RerollError:
        return False
    return any((loop.captured or loop.recurrence).short for each in (found, *found.others) for loop in each.loops)


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="reroll") if model_of(model) is model else model


class _Call:
    """A training step that can be run any number of times, and leaves nothing behind."""

    def __init__(self, plain: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any], loss: Any, seed: int) -> None:
        self.plain, self.inputs, self.kwargs, self.loss, self.seed = plain, inputs, kwargs, loss, seed
        self.leaves = dict(named_leaves(plain, inputs, kwargs))

    def seen(self, model: Any) -> _Seen:
        """What a step of the plain or of the compiled model shows."""
        state = State.of(self.plain, self.inputs, self.kwargs, parameters=True)
        seen = _Seen()
        try:
            with random_numbers_kept():
                result, grads = self._step(model)
                seen.others["random numbers that follow"] = _following()
            _note_result(seen, result)
            seen.gradients = dict(zip(self.leaves.values(), grads, strict=True))
            _note_state(seen, state, self.leaves)
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
        result = model(*self.inputs, **self.kwargs)
        if not self.leaves or not any(each.requires_grad for _, each in places_of(result)):
            return result, [None] * len(self.leaves)
        return result, list(torch.autograd.grad(self.loss(result), list(self.leaves), allow_unused=True))


def _following() -> tuple[float, ...]:
    """The next random number of each generator."""
    drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
    if torch.cuda.is_initialized():
        drawn += [float(torch.rand((), device=f"cuda:{index}")) for index in range(torch.cuda.device_count())]
    return tuple(drawn)


def _note_result(seen: _Seen, result: Any) -> None:
    seen.others["structure of the result"] = structure_of(result)
    for place, value in places_of(result):
        name = "result" + "".join(f"[{key!r}]" for key in place)
        seen.tensors[name] = value.detach().clone()
        seen.layouts[f"layout of {name}"] = _layout(value)
        seen.others[f"requires_grad of {name}"] = value.requires_grad


def _layout(value: Tensor) -> Layout:
    if value.layout is not torch.strided or value.numel() == 0:
        return ()
    return tuple((size, step) for size, step in zip(value.shape, value.stride(), strict=True) if size > 1)


def _lie_alike(before: Layout, after: Layout) -> bool:
    """Whether strides are equal, or, where the plain one repeats or leaves out memory, dimensions lie in one order."""
    if before == after or len(before) != len(after):
        return before == after
    kept = [dim for dim, (_, step) in enumerate(before) if step]
    orders = [sorted(kept, key=lambda dim: -each[dim][1]) for each in (before, after)]
    return (len(kept) < len(before) or _has_gaps(before)) and orders[0] == orders[1]


def _has_gaps(layout: Layout) -> bool:
    """Whether memory lies between the entries that belongs to none of them, as in a row of a transposed batch."""
    dense = 1
    for size, step in sorted(layout, key=lambda each: each[1]):
        if step > dense:
            return True
        dense *= size
    return False


def _note_state(seen: _Seen, state: State, leaves: Mapping[Tensor, str]) -> None:
    """Tensors that can be reached from the model and its inputs, and what the call made of attributes."""
    for number, (value, version, kept) in enumerate(state.tensors):
        if kept is not None and not (isinstance(value, nn.Parameter) and version_of(value) == version):
            seen.tensors[f"afterwards {leaves.get(value, f'tensor {number}')}"] = value.detach().clone()
    for name, value, *_ in state.changes():
        if isinstance(value, Tensor):
            seen.tensors[f"attribute {name}"] = value.detach().clone()
        elif isinstance(value, bool | int | float | str | type(None)):
            seen.others[f"attribute {name}"] = value


def _compared(expected: _Seen, actual: _Seen, tolerance: float | None) -> tuple[list[Difference], float]:
    errors = [0.0]
    differences = []
    for name in dict.fromkeys((*expected.others, *actual.others)):
        before, after = (each.others.get(name, "nothing") for each in (expected, actual))
        if before != after:
            differences.append(Difference(name, f"{after} instead of {before}"))
    for name, lies in expected.layouts.items():
        other = actual.layouts.get(name, lies)  # what is missing differs in its structure
        if not _lie_alike(lies, other):
            strides = [tuple(step for _, step in each) for each in (other, lies)]
            differences.append(Difference(name, f"strides {strides[0]} instead of {strides[1]}"))
    floor = _NOISE * max(map(_largest, expected.gradients.values()), default=0.0)
    names = dict.fromkeys((*expected.tensors, *actual.tensors))
    pairs = [(name, expected.tensors.get(name), actual.tensors.get(name), 0.0) for name in names]
    for name, before in expected.gradients.items():
        pairs.append((f"gradient of {name}", before, actual.gradients[name], floor))
    for name, before, after, least in pairs:
        difference = _difference(name, before, after, tolerance, least, errors)
        differences += [difference] if difference else []
    return differences, max(errors)


def _difference(
    name: str, before: Tensor | None, after: Tensor | None, tolerance: float | None, least: float, errors: list[float]
) -> Difference | None:
    """How two tensors differ; nothing where they do not. Their distance joins the errors."""
    if before is None or after is None:
        return None if before is after else Difference(name, f"{_kind(after)} instead of {_kind(before)}")
    if (before.shape, before.dtype, before.device) != (after.shape, after.dtype, after.device):
        return Difference(name, f"{_kind(after)} instead of {_kind(before)}")
    error = distance(before, after, least)
    errors.append(error)
    exact = not (before.is_floating_point() or before.is_complex())
    allowed = 0.0 if exact else tolerance if tolerance is not None else TOLERANCE.get(before.dtype, _SHORT)
    if error <= allowed:
        return None
    what = f"{error:.1e} off, relative to its largest entry; at most {allowed:.0e} is allowed"
    return Difference(name, what, error)


def _kind(value: Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _largest(value: Tensor | None) -> float:
    if value is None or not value.numel():
        return 0.0
    return float(_dense(value).abs().nan_to_num(0, 0, 0).max())


def _dense(value: Tensor) -> Tensor:
    return value if value.layout is torch.strided else value.to_dense()


def distance(before: Tensor, after: Tensor, least: float = 0.0) -> float:
    """The largest difference of two tensors, relative to the largest entry of the first, or to ``least`` if larger.

    Infinite where one alone is NaN or infinite, or where nothing says how large the entries are.
    """
    if before.numel() == 0:
        return 0.0
    wide = torch.complex128 if before.is_complex() else torch.float64
    first, second = _dense(before).to(wide), _dense(after).to(wide)
    same = (first == second) | (first.isnan() & second.isnan())
    if bool(same.all()):
        return 0.0
    if not bool((same | (first.isfinite() & second.isfinite())).all()):
        return float("inf")
    scale = max(_largest(first), least)
    off = float((first - second).abs()[~same].max())
    return off / scale if scale else float("inf")


def _times(before: float, after: float, better: str, worse: str) -> str:
    """By how much one number is below another, in words."""
    if not before or not after:
        return f"no {better} to tell"
    return f"{before / after:.1f} times {better}" if after <= before else f"{after / before:.1f} times {worse}"


__all__ = ["TOLERANCE", "Check", "Difference", "check", "distance"]
