"""What one call of a model shows, and where two calls differ: what ``reroll.check`` and proofs compare."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from reroll.graph.nested import places_of, structure_of, tensors_of
from reroll.graph.private import any_autocast
from reroll.recurrence import Recurrence

TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
"""The largest difference that rounding explains, relative to the largest entry of a tensor; 0.02 of shorter numbers."""
SHORT = 0.02
FOLLOWING = "random numbers that follow"
_OF_SUMS = 0.25  # of the last digit for each term: the most is a half
_ZERO = 1e-3
"""A gradient that is this small beside the largest is what rounding leaves of zero: it is measured by that."""


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


Layout = tuple[tuple[int, int], ...]
"""Size and stride of each dimension that has a second entry."""


@dataclass
class Seen:
    """All that one call shows, by name. ``tensors`` are copies; ``layouts`` sizes and strides; ``others`` are compared
    by ``==``."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


def following() -> tuple[float, ...]:
    """The next random number of each generator."""
    drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
    if torch.cuda.is_initialized():
        drawn += [float(torch.rand((), device=f"cuda:{index}")) for index in range(torch.cuda.device_count())]
    return tuple(drawn)


def note_result(seen: Seen, result: Any, *, needs: bool = True) -> None:
    """The values of a result, how they lie, and whether they need gradients (``needs``)."""
    seen.others["structure of the result"] = structure_of(result)
    for place, value in places_of(result):
        name = "result" + "".join(f"[{key!r}]" for key in place)
        seen.tensors[name] = value.detach().clone()
        seen.layouts[f"layout of {name}"] = _layout(value)
        if needs:
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


class Rounding(NamedTuple):
    """The largest difference that rounding explains, of values and of gradients."""

    values: float = 0.0
    gradients: float = 0.0


EXACT = Rounding()


def rounding_of(recurrences: Iterable[Recurrence], around: Iterable[fx.Graph] = ()) -> Rounding:
    """What rounding explains of what loops make, and the graphs ``around`` them, into which what a step does row by row
    may be moved: of their coarsest numbers, as what is made of these is no more exact, whatever its dtype. Autocast
    rounds inside of torch's cells, too. A gradient to which each of many steps adds, such as that of a bias, is rounded
    as often, and always the same way where they add the same."""
    found, added = SHORT if any_autocast() else 0.0, 0.0
    made = (node.meta.get("example_value") for graph in around for node in graph.nodes if node.op[:4] == "call")
    for dtype in {each.dtype for each in tensors_of(list(made))}:
        found = max(found, TOLERANCE.get(dtype, SHORT) if dtype.is_floating_point or dtype.is_complex else 0.0)
    for each in recurrences:
        if any(enabled for _, _, enabled, _ in each.autocast):
            found = SHORT
        values = (node.meta.get("example_value") for node in each.step.graph.nodes)
        dtypes = {value.dtype for value in (*values, *each.examples) if isinstance(value, Tensor)}
        floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        found = max([found, *(TOLERANCE.get(dtype, SHORT) for dtype in floats)])
        added = max(
            [added, *(_OF_SUMS * each.steps * torch.finfo(dtype).eps for dtype in floats if dtype in TOLERANCE)]
        )
    return Rounding(found, max(found, min(added, SHORT)))


def compared(
    expected: Seen, actual: Seen, tolerance: float | None, rounding: Rounding = EXACT
) -> tuple[list[Difference], float]:
    """All that differs, and the largest difference of a number, relative to the largest entry of its tensor.

    tolerance: what is allowed of these; None: what rounding explains of the tensor's dtype, or ``rounding`` if more.
    """
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
    floor = _ZERO * max(map(largest, expected.gradients.values()), default=0.0)
    names = dict.fromkeys((*expected.tensors, *actual.tensors))
    pairs = [(name, expected.tensors.get(name), actual.tensors.get(name), 0.0, rounding.values) for name in names]
    alike = (name for name in expected.gradients if name in actual.gradients)  # else results differ in needing any
    grads = ((name, expected.gradients[name], actual.gradients[name]) for name in alike)
    pairs += [(f"gradient of {name}", before, after, floor, rounding.gradients) for name, before, after in grads]
    for name, before, after, least, rounded in pairs:
        dtype = before.dtype if before is not None else torch.float64
        allowed = max(rounded, TOLERANCE.get(dtype, SHORT)) if tolerance is None else tolerance
        difference = _difference(name, before, after, allowed, least, errors)
        differences += [difference] if difference else []
    return differences, max(errors)


def _difference(
    name: str, before: Tensor | None, after: Tensor | None, allowed: float, least: float, errors: list[float]
) -> Difference | None:
    """How two tensors differ; nothing where they do not. Their distance joins the errors."""
    if before is None or after is None:
        return None if before is after else Difference(name, f"{_kind(after)} instead of {_kind(before)}")
    if (before.shape, before.dtype, before.device) != (after.shape, after.dtype, after.device):
        return Difference(name, f"{_kind(after)} instead of {_kind(before)}")
    error = distance(before, after, least)
    errors.append(error)
    exact = not (before.is_floating_point() or before.is_complex())
    allowed = 0.0 if exact else allowed
    if error <= allowed:
        return None
    what = f"{error:.1e} off, relative to its largest entry; at most {allowed:.0e} is allowed"
    return Difference(name, what, error)


def _kind(value: Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def largest(value: Tensor | None) -> float:
    """The largest entry of a tensor, of those that are finite."""
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
    scale = max(largest(first), least)
    off = float((first - second).abs()[~same].max())
    return off / scale if scale else float("inf")


_ROUNDINGS = 100  # that noise is as large as
NOISES = 8
"""Runs with noise: a decision within rounding falls the other way in half of them."""


def moved(value: Tensor, generator: torch.Generator, *, short: bool = False) -> Tensor:
    """A value with noise of some roundings of its dtype on each entry, or of half precision if what it goes into is
    ``short``; what holds no such numbers is itself."""
    if not (value.is_floating_point() or value.is_complex()):
        return value
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
    size = SHORT if short else min(_ROUNDINGS * torch.finfo(value.dtype).eps, SHORT)
    made: Tensor = value.to(as_numbers(value).dtype) * (1 + size * noise)
    return made


def as_numbers(value: Tensor) -> Tensor:
    """In double precision."""
    return _dense(value).detach().to(torch.complex128 if value.is_complex() else torch.float64)


Named = Mapping[str, Tensor | None]


def spread_of(middle: Named, others: Iterable[Named]) -> dict[str, Tensor]:
    """How far each entry of tensors by name is from a middle one at most."""
    found = dict[str, Tensor]()
    for other in others:
        for name, value in middle.items():
            off = other.get(name)
            if value is not None and off is not None and off.shape == value.shape:
                distances = _distances(off, value)
                found[name] = torch.maximum(found.get(name, distances), distances)
    return found


def _distances(first: Tensor, second: Tensor) -> Tensor:
    """Of each entry from another; infinite where one alone is finite. Infinities that are added in another order may
    become NaN."""
    one, other = as_numbers(first), as_numbers(second)
    same = (one == other) | ~(one.isfinite() | other.isfinite())
    return (one - other).abs().nan_to_num(torch.inf, torch.inf).masked_fill(same, 0)


def without_noise(found: Named, expected: Named, spread: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Tensors without that part of what they are off which noise explains."""
    result = dict[str, Tensor | None]()
    for name, value in found.items():
        want, explained = expected.get(name), spread.get(name)
        if value is None or want is None or explained is None or value.shape != want.shape:
            result[name] = value
            continue
        error = as_numbers(value) - as_numbers(want)
        left = (_distances(value, want) - 3 * explained).clamp(min=0)
        near = torch.where(left > 0, as_numbers(want) + torch.sgn(error) * left, as_numbers(want))
        result[name] = torch.where(left.isinf(), as_numbers(value), near).to(value.dtype)
    return result
