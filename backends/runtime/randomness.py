"""The random number state that a step reads: the computer's, and that of the GPUs that the operands live on.

The first run of a step draws from torch's generators, as eager does. Whatever runs again, in a backward pass, draws the
same numbers from a generator of its own (``OwnNumbers``): torch's are those of the process, and another thread may draw
from them at the same time. Those of a GPU are set and put back, as recordings are tied to them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reroll.graph.private import Watching, argument_names, is_overload

aten = torch.ops.aten


def random_state(operands: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The present state: of the computer first, then of each GPU among the operands' devices, in order of index."""
    return (torch.get_rng_state(), *device_states(operands))


def device_states(operands: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The present states of the GPUs among the operands' devices, in order of index."""
    indices = sorted({operand.device.index for operand in operands if operand.device.type == "cuda"})
    return tuple(map(_marked, indices))


def _marked(index: int) -> Tensor:
    """A GPU's state with its index in front, so that a state alone says where it belongs."""
    return torch.cat([torch.tensor([index], dtype=torch.uint8, device="cpu"), torch.cuda.get_rng_state(index)])


def set_random_state(state: tuple[Tensor, ...]) -> None:
    """Go back to a state."""
    torch.set_rng_state(state[0])
    set_device_states(state[1:])


def set_device_states(states: Iterable[Tensor]) -> None:
    """Go back to states of GPUs."""
    for marked in states:
        torch.cuda.set_rng_state(marked[1:], int(marked[0]))


def move_on() -> None:
    """Draw a number from each of torch's generators, so that who sets one to the state that it had is seen."""
    torch.rand((), device="cpu")
    for index in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
        torch.rand((), device=f"cuda:{index}")


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Put back the states of Python's, numpy's and torch's generators afterwards."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # the state that users share
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


def numpy_state() -> Any:
    """The state of numpy's generator that users share, as something that can be compared."""
    found = dict(np.random.get_state(legacy=False))  # noqa: NPY002  # the state that users share
    parts = (*found.pop("state").values(), *found.values())
    return tuple(each.tobytes() if isinstance(each, np.ndarray) else each for each in parts)


class OwnNumbers:
    """A generator for what runs again on the computer; inside of ``drawing`` this thread's operations draw from it."""

    def __init__(self, state: tuple[Tensor, ...]) -> None:
        self.generator = torch.Generator()
        self.start(state)

    def start(self, state: tuple[Tensor, ...]) -> None:
        """Draw from a state on, on GPUs too."""
        self.generator.set_state(state[0])
        set_device_states(state[1:])

    def state(self, operands: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """The present state, as ``random_state`` gives it."""
        return (self.generator.get_state(), *device_states(operands))

    def drawing(self) -> Watching:
        """A context for operations that draw."""
        return _Drawing(self.generator)


class _Drawing(Watching):
    """Gives random operations on the computer a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_overload(func):  # it runs functions, in which this mode is asked nothing
            with _swapped(self.generator):
                return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags and func.namespace in ("aten", "prims"):
            return func(*args, **kwargs)
        if _is_elsewhere(args, kwargs):
            return func(*args, **kwargs)
        if func is aten.native_dropout.default:
            return _dropped(*args, **kwargs, generator=self.generator)
        seeded = _with_generator(func)
        if seeded is not None and kwargs.get("generator") is None:
            return seeded(*args, **{**kwargs, "generator": self.generator})
        with _swapped(self.generator):
            return func(*args, **kwargs)


def _is_elsewhere(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws on a GPU."""
    device = kwargs.get("device")
    tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    return (device is not None and torch.device(device).type != "cpu") or any(each.is_cuda for each in tensors)


@cache
def _with_generator(func: Any) -> Any:
    """The overload of an operation that takes a generator beside its operands; None where there is none."""
    names = argument_names(func)
    if "generator" in names:
        return func
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        if argument_names(other) == names | {"generator"}:
            return other
    return None


def _dropped(value: Tensor, p: float, train: bool | None, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``native_dropout``, which takes no generator, by the operations that torch does it by."""
    if train is False or value.numel() == 0:
        return value.clone(), torch.ones_like(value, dtype=torch.bool)
    kept = 1.0 - p
    mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(kept, generator=generator)
    return value.mul(mask).mul_(1.0 / kept if kept else 0.0), mask


@contextmanager
def _swapped(generator: torch.Generator) -> Iterator[None]:
    """Torch's generator goes on from the state of another one inside, for what takes none: an operator of a user's."""
    here = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(here)
