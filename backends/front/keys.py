"""What a recorded graph holds for, in place of Dynamo's guards: a key of all that can be reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reroll.backends.front.state import State
from reroll.backends.processes.apart import in_parts
from reroll.capture.recorder.identity import PLAIN, Same
from reroll.errors import UnsupportedError
from reroll.graph.inplace import overlapping, whole_extent
from reroll.graph.private import any_autocast, autocast_dtypes

_LARGE, _SAMPLES = 1 << 20, 4096  # bytes from which on an array is a data set, and of how many places it is known by
_PLAIN = (*PLAIN, type(...), torch.Size)


def plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, which holds nothing else."""
    return isinstance(value, _PLAIN)


def key_of(state: State, roots: Any) -> Any:
    """Equal for two states in which the same operations have the same operands at the same positions.

    Numbers and texts are told apart by value; tensors by all but their values; objects of torch's and others that are
    not looked into, by identity. The modes of torch that change what operations do belong to it too.
    """
    places: dict[int, int] = {}
    for value in (*(each for each, *_ in state.objects), *(each for each, _ in state.containers)):
        places[id(value)] = len(places)
    tensors = {id(value): index for index, (value, _, _) in enumerate(state.tensors)}

    def described(value: Any) -> Any:
        if id(value) in tensors:
            return "tensor", tensors[id(value)]
        if id(value) in places:
            return "object", places[id(value)]
        if plain(value):
            return type(value), repr(value)
        if isinstance(value, tuple):
            return type(value), tuple(map(described, value))
        return Same(value)

    owners = [(type(value), _items(attributes, described)) for value, attributes in state.objects]
    owners += [(type(value), _items(content, described)) for value, content in state.containers]
    cells = tuple(described(content) for _, content in state.cells)
    arrays = tuple(_array(each) for each, _ in state.arrays)
    held = (tuple(owners), cells, arrays, tuple(state.plain), _tensors(state))
    return described(roots[0]), _nested(roots[1:], described), held, _modes()


def _array(value: Any) -> Any:
    """An array of numpy's by its values; a large one by where it is, and by some of its values."""
    if value.nbytes <= _LARGE or value.dtype.hasobject:
        return value.shape, value.dtype.str, value.tobytes()
    flat = value.reshape(-1) if value.flags.c_contiguous else value.flat
    some = flat[:: max(value.size // _SAMPLES, 1)].tobytes()
    return value.shape, value.dtype.str, value.__array_interface__["data"][0], value.strides, some


def _items(content: Any, described: Any) -> Any:
    if isinstance(content, dict):
        return tuple((described(key), described(value)) for key, value in content.items())
    return tuple(map(described, content))


def _nested(roots: Any, described: Any) -> Any:
    """The arguments: the tuple and the dict of a call are new at every call, so they are known by what they hold."""
    args, kwargs = roots
    return tuple(map(described, args)), _items(kwargs, described)


def _tensors(state: State) -> Any:
    values = [value for value, _, _ in state.tensors]
    groups = sharing(values)
    first = {number: values[group[0]].data_ptr() for group in groups for number in group}
    offsets = (value.data_ptr() - first[number] if number in first else 0 for number, value in enumerate(values))
    return groups, tuple(map(_tensor, values, offsets))


def sharing(values: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Numbers of the tensors and arrays that share memory with each other. Raises UnsupportedError for a DTensor."""
    if any(map(in_parts, values)):
        raise UnsupportedError(
            "reroll.compile: the model holds or is given a DTensor, whose parts lie in several processes. Give it "
            "whole tensors, or compile by reroll.compile only the parts of it that have these."
        )
    return overlapping([whole_extent(value) for value in values])


def _tensor(value: Tensor, offset: int) -> Any:
    """All but the values.

    offset: bytes from the first tensor in the same memory. Where that one begins does not count: batches that are views
    of one data set are alike.
    """
    if value.layout != torch.strided:
        return Same(value)
    layout = (tuple(value.shape), value.stride(), offset)
    return (*layout, type(value), value.dtype, value.device, value.requires_grad, value.is_leaf, value.is_inference())


def _modes() -> Any:
    found = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), any_autocast() and autocast_dtypes())
    return (*found, torch.get_default_dtype(), torch.get_default_device())
