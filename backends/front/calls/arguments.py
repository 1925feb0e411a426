"""The arguments of one call of a model, and others like them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reroll.graph.nested import mapped, places_of, tensors_of
from reroll.segment.trace import packed

_LEAST = 2  # the size that no other one of 2 or more is a half of


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, model: Callable[..., Any]) -> Any:
        """What a model makes of these arguments."""
        return model(*self.args, **self.kwargs)

    def without_history(self) -> tuple[Call, dict[int, Tensor]]:
        """The call without what came before it: tensors with a history have one of their own, from a leaf of the same
        memory. Those leaves, by the identity of what is made of each."""
        old = {id(each): each for each in tensors_of((self.args, self.kwargs)) if has_history(each)}
        leaves = {number: each.detach().requires_grad_() for number, each in old.items()}
        with torch.enable_grad():
            made = {number: leaf.view_as(leaf) for number, leaf in leaves.items()}
        call = self._with(made) if made else self
        return call, {id(value): leaves[number] for number, value in made.items()}

    def _with(self, made: Mapping[int, Tensor]) -> Call:
        """The call with what was made in place of tensors, by their identity."""
        each = partial(_in_place_of, made)
        return Call(tuple(map(each, self.args)), {name: each(value) for name, value in self.kwargs.items()})

    def sizes(self) -> Any:
        """The sizes of all arguments, which are those of a batch and of the sequences in it."""
        return tuple(tuple(value.shape) for value in tensors_of((self.args, self.kwargs)))

    def other_sizes(self) -> Iterator[Call]:
        """Calls with about half of the size of a dimension of the first tensor, in all that have a dimension of that
        size. Sizes stay 2 or more."""
        tensors = [each for each in tensors_of((self.args, self.kwargs)) if not isinstance(each, torch.nn.Parameter)]
        for size in (size for value in tensors[:1] for size in value.shape if size > _LEAST):
            alike = (each for each in tensors if size in each.shape)
            yield self._with({id(each): _half_of(each, each.shape.index(size)) for each in alike})

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


def _half_of(value: Tensor, dim: int) -> Tensor:
    """About half of the entries along a dimension, in memory of their own, laid out as the whole is."""
    with torch.no_grad():
        made = packed(value.detach().narrow(dim, 0, value.shape[dim] // 2 + 1)).clone()
    return made.requires_grad_(value.requires_grad)
