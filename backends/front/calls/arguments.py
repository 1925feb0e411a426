"""Where time is in the arguments of a model, and arguments of other lengths.

``time_dim`` is one dimension for every tensor that has it at the common length, or a mapping from the names of
parameters to dimensions, in which ``None`` means "no time", and tuples, lists and dicts follow those of the arguments.
Where the input is the same at every step, time is in no tensor, and a number of the model's says how long it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reroll.backends.front.calls.counter import Counter, find_counter
from reroll.backends.progress import LONG
from reroll.errors import OptionError, UnsupportedError
from reroll.graph.nested import Place, leaves_of, mapped, places_of, tensors_of
from reroll.segment.trace import dense, packed

TimeDim = int | Mapping[str, Any]
_LEAST = 2  # the size that no other one of 2 or more is a half of


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one call: ``dims`` says in which dimension each tensor with time has it, by its identity,
    ``counter`` which number of the model's is that of the steps, if there is one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: Mapping[int, int]
    length: int
    counter: Counter | None = None

    def run(self, model: Callable[..., Any]) -> Any:
        """What a model makes of these arguments, in ``length`` steps."""
        if self.counter is None:
            return model(*self.args, **self.kwargs)
        args, kwargs = self.counter.given(self.args, self.kwargs, self.length)
        with self.counter.at(self.length):
            return model(*args, **kwargs)

    def as_it_is(self) -> AbstractContextManager[None]:
        """Inside, the number of steps is what the user set."""
        return nullcontext() if self.counter is None else self.counter.at(self.length)

    @property
    def places(self) -> tuple[tuple[Place, int], ...]:
        """Where in the arguments time is, and in which dimension."""
        named = places_of((self.args, self.kwargs))
        return tuple((place, self.dims[id(value)]) for place, value in named if id(value) in self.dims)

    def resized(self, length: int, change: Callable[[Tensor, int, int], Tensor]) -> tuple[Call, dict[int, Tensor]]:
        """The call of ``length`` steps, with ``change(tensor, dim, length)`` for every tensor with time, and the
        original of each, by identity.
        """
        sequences = {id(value): value for value in self._sequences()}
        made = {old: change(value, self.dims[old], length) for old, value in sequences.items()}
        return self._with(made, length), {id(made[old]): sequences[old] for old in made}

    def apart(self) -> tuple[Call, dict[int, Tensor]]:
        """The call without what came before it: tensors with a history have one of their own, from a leaf of the same
        memory. Those leaves, by the identity of what is made of each."""
        old = {id(each): each for each in tensors_of((self.args, self.kwargs)) if has_history(each)}
        leaves = {number: each.detach().requires_grad_() for number, each in old.items()}
        with torch.enable_grad():
            made = {number: leaf.view_as(leaf) for number, leaf in leaves.items()}
        call = self._with(made, self.length) if made else self
        return call, {id(value): leaves[number] for number, value in made.items()}

    def _with(self, made: Mapping[int, Tensor], length: int) -> Call:
        """The call of ``length`` steps with what was made in place of tensors, by their identity."""
        each = partial(_in_place_of, made)
        args, kwargs = tuple(map(each, self.args)), {name: each(value) for name, value in self.kwargs.items()}
        dims = {id(made[old]) if old in made else old: dim for old, dim in self.dims.items()}
        return Call(args, kwargs, dims, length, self.counter)

    def other_sizes(self) -> Iterator[Call]:
        """Calls with about half of the size in a dimension beside time, such as that of a batch: first of the tensors
        with time alone, then of all that have a dimension of that size. Sizes stay 2 or more."""
        sequences, times = self._sequences(), {*self.dims.values()}
        tensors = [each for each in tensors_of((self.args, self.kwargs)) if not isinstance(each, torch.nn.Parameter)]
        others = [each for each in tensors if id(each) not in self.dims]
        leading = (sequences or tensors)[:1]
        for dim, size in ((dim, size) for value in leading for dim, size in enumerate(value.shape)):
            if dim in times or size <= _LEAST:
                continue
            found = {id(each): _half_of(each, dim) for each in sequences if each.shape[dim : dim + 1] == (size,)}
            beside = {
                id(each): _half_of(each, each.shape.index(size), own=True) for each in others if size in each.shape
            }
            yield from (self._with(made, self.length) for made in (found, found | beside if beside else {}) if made)

    def along(self, dim: int) -> Call | None:
        """The same arguments with time in another dimension, if all that have time have that, of one length."""
        having = self._sequences()
        lengths = {value.shape[dim] if dim < value.dim() else None for value in having}
        if dim in self.dims.values() or lengths == {None} or len(lengths) > 1:
            return None
        return Call(self.args, self.kwargs, dict.fromkeys(self.dims, dim), having[0].shape[dim], self.counter)

    def shapes(self) -> str:
        """Which dimension of which shape time is in."""
        named = (f"dimension {self.dims[id(value)]} of {list(value.shape)}" for value in self._sequences())
        return ", ".join(dict.fromkeys(named))

    def doubts(self) -> str:
        """What to ask oneself where reading the model takes long."""
        named = f"time_dim names {self.shapes()}" if self.dims else f"steps names {self.counter and self.counter.name}"
        return (
            f"reroll.compile has been reading the model for {LONG:.0f} s. It looks at a few steps of the loop over "
            f"time only, but a loop over something else is unrolled step by step. {named}: if the loop does not run "
            "over that, interrupt, and name the right one."
        )

    def _sequences(self) -> list[Tensor]:
        return [value for value in tensors_of((self.args, self.kwargs)) if id(value) in self.dims]

    def names(self) -> dict[int, str]:
        """A name of every tensor in the arguments, by its identity."""
        found = {id(value): f"argument {place}" for place, value in places_of(self.args, ())}
        return {id(value): f"argument {place}" for place, value in places_of(self.kwargs, ())} | found


def has_history(value: Tensor) -> bool:
    """Whether a gradient of a tensor would go on to what it was made of."""
    return value.requires_grad and not value.is_leaf


def _in_place_of(made: Mapping[int, Tensor], value: Any) -> Any:
    """A nested value with what was made in place of its tensors, by their identity. No function inside of another: one
    that calls itself is a cycle, and would hold the arguments of a call until Python collects."""
    if isinstance(value, Tensor):
        return made.get(id(value), value)
    return mapped(partial(_in_place_of, made), value)


@dataclass(frozen=True, slots=True)
class Time:
    """Where a model has time: a dimension of its arguments, a number of its own (``counter``), or both; or nobody has
    said where."""

    dim: TimeDim | None
    steps: str | None = None


def find_time(
    model: Callable[..., Any], signature: inspect.Signature | None, time: Time, args: Any, kwargs: Any
) -> Call:
    """Where time is in a call. Raises OptionError if the arguments or the model do not have it where it should be."""
    counter = None if time.steps is None else find_counter(model, signature, time.steps, args, kwargs)
    if time.dim is None:
        return Call(tuple(args), dict(kwargs), {}, 0 if counter is None else counter.steps, counter)
    dims, length = _sequences(signature, time.dim, args, kwargs)
    if counter is not None and counter.steps != length:
        raise OptionError(
            f"reroll.compile: steps={counter.name!r} is {counter.steps}, but the time dimensions that time_dim="
            f"{time.dim!r} names are {length} long. Leave out time_dim if the input is the same at every step."
        )
    return Call(tuple(args), dict(kwargs), dims, length, counter)


def _arrays(args: Any, kwargs: Any) -> str:
    """What to say of arrays of numpy's among the arguments, which nothing is compiled for."""
    found = [each for each in leaves_of((args, kwargs)) if isinstance(each, np.ndarray)]
    if not found:
        return ""
    shapes = " and ".join(str(list(each.shape)) for each in found)
    return f" An array of numpy's, as that of the shape {shapes} here, is no tensor: give torch.from_numpy of it."


def _sequences(
    signature: inspect.Signature | None, time_dim: TimeDim, args: Any, kwargs: Any
) -> tuple[dict[int, int], int]:
    """The dimension of time of each tensor that has it, by its identity, and how long it is."""
    if isinstance(time_dim, int):
        dims = _everywhere(time_dim, tensors_of((args, kwargs)))
    else:
        dims = dict(_named(signature, time_dim, args, kwargs))
    if not dims:
        raise OptionError(
            f"reroll.compile: no argument has the time dimension that time_dim={time_dim!r} names. Pass the sequence "
            f"as a tensor argument, and name its time dimension.{_arrays(args, kwargs)}"
        )
    lengths = {value.shape[dims[id(value)]] for value in tensors_of((args, kwargs)) if id(value) in dims}
    if len(lengths) > 1:
        raise OptionError(
            f"reroll.compile: the arguments have different lengths in their time dimensions: {sorted(lengths)}. Name "
            "those that have time in a mapping, such as time_dim={'x': 0, 'h': None}."
        )
    return dims, lengths.pop()


def _everywhere(dim: int, tensors: Sequence[Tensor]) -> dict[int, int]:
    """Time in every tensor that has the dimension at the length of the first one that has it."""
    having = [t for t in tensors if -t.dim() <= dim < t.dim() and not isinstance(t, torch.nn.Parameter)]
    return {id(t): dim % t.dim() for t in having if t.shape[dim] == having[0].shape[dim]}


def _named(
    signature: inspect.Signature | None, time_dim: Mapping[str, Any], args: Any, kwargs: Any
) -> Iterator[tuple[int, int]]:
    if signature is None:
        raise OptionError("reroll.compile: this callable has no signature, so time_dim must be one dimension.")
    given: dict[str, Any] = signature.bind(*args, **kwargs).arguments
    extra: Any = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    given = {**given, **given.get(extra, {})}
    for name, dim in time_dim.items():
        if name not in given and name not in signature.parameters and extra is None:
            raise OptionError(
                f"reroll.compile: time_dim names {name!r}, which is no parameter. Parameters are: "
                f"{', '.join(signature.parameters)}."
            )
        if name in given:
            yield from _along(given[name], dim, name)


def _along(value: Any, dim: Any, name: str) -> Iterator[tuple[int, int]]:
    """(identity, dimension) of the tensors with time in one argument."""
    if dim is None or value is None:
        return
    if isinstance(dim, Mapping) and isinstance(value, Mapping):
        for key in dim:
            yield from _along(value.get(key), dim[key], f"{name}[{key!r}]")
    elif isinstance(dim, tuple | list) and isinstance(value, tuple | list) and len(dim) == len(value):
        for index, (item, each) in enumerate(zip(value, dim, strict=True)):
            yield from _along(item, each, f"{name}[{index}]")
    elif isinstance(dim, int) and isinstance(value, Mapping | tuple | list):
        yield from _everywhere(dim, tensors_of(value)).items()
    elif isinstance(dim, int) and isinstance(value, Tensor) and -value.dim() <= dim < value.dim():
        yield id(value), dim % value.dim()
    else:
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise OptionError(f"reroll.compile: time_dim of argument {name} is {dim!r}, but the argument is {found}.")


def first_steps(value: Tensor, dim: int, length: int) -> Tensor:
    """The first ``length`` steps, apart from the original; a shorter sequence is repeated."""
    with torch.no_grad():
        index = torch.arange(length, device=value.device) % max(value.shape[dim], 1)
        taken = value.detach().index_select(dim, index)
    return taken.requires_grad_(value.requires_grad)


def _half_of(value: Tensor, dim: int, *, own: bool = False) -> Tensor:
    """About half of the entries along a dimension: a view, or in memory of its ``own``, laid out as the whole is."""
    with torch.no_grad():
        made = value.detach().narrow(dim, 0, value.shape[dim] // 2 + 1)
        made = packed(made).clone() if own else made
    return made.requires_grad_(value.requires_grad)


def repeated(value: Tensor) -> list[int]:
    """The dimensions along which every entry is the same memory, as ``expand`` makes them."""
    return [
        dim for dim, (size, step) in enumerate(zip(value.shape, value.stride(), strict=True)) if size > 1 and not step
    ]


def token(value: Tensor, dim: int, length: int) -> Tensor:
    """A tensor that stands for a sequence where Dynamo looks: like it in all but its length and its values.

    Its layout has the same order of dimensions, without gaps, so that it does not depend on the length.
    """
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
        raise UnsupportedError(
            f"reroll.compile takes plain tensors with time, not {type(value).__name__} ({value.layout}). Pass it "
            "without time (time_dim as a mapping), or use torch.compile(backend='reroll')."
        )
    sizes = [length if at == dim else size for at, size in enumerate(value.shape)]
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        made = torch.empty_strided(sizes, dense(sizes, value.stride()), dtype=value.dtype, device=value.device)
    if value.requires_grad:
        made.requires_grad_()
        with torch.enable_grad():
            if value.is_leaf:
                return made
            return made.view_as(made) if repeated(made) else made.clone()  # a clone would be written out
    return made
