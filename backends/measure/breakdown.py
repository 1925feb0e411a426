"""``reroll.breakdown``: what a training step holds in memory, and for what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from reroll.backends.measure.events import addresses, peak_of
from reroll.backends.measure.measure import traced
from reroll.backends.progress import telling_of_compilation
from reroll.errors import UnsupportedError
from reroll.graph.nested import tensors_of
from reroll.words.units import nbytes_text


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Bytes of a training step.

    ``parameters`` with the buffers, ``gradients`` and ``optimizer`` state are counted as they are after the step, and
    memory that tensors share once. ``recurrences`` and ``rest`` are what else is held at the moment at which that is
    most: what compiled recurrences have allocated, their outputs included, and everything outside of them.
    """

    parameters: int
    gradients: int
    optimizer: int
    recurrences: int
    rest: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, each.name) for each in fields(self))

    def __str__(self) -> str:
        rows = [*((each.name, getattr(self, each.name)) for each in fields(self)), ("total", self.total)]
        share = 100 / max(self.total, 1)
        return "\n".join(f"{name:<12} {nbytes_text(nbytes):>10} {share * nbytes:4.0f} %" for name, nbytes in rows)


def breakdown(
    step: Callable[[], Any], model: nn.Module | Iterable[Tensor], optimizer: torch.optim.Optimizer | None = None
) -> Breakdown:
    """Run a training step once, under torch's profiler, and say what its memory is for.

    step: forward and backward, and ``optimizer.step()`` if that is to count; it clears gradients at its beginning, if
    at all, so that they are still there after it. model: a module, or the parameters that are trained. Inputs, and all
    else that was there before, do not count. Run a step before: compilation would count, of which a RerollWarning
    tells. Raises UnsupportedError if no gradient is left, and for tensors of a GPU, whose allocator is not read.
    """
    owned = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else list(model)
    if any(tensor.is_cuda for tensor in owned):
        raise UnsupportedError("breakdown reads the allocator of the CPU only. Use reroll.measure on a GPU.")
    with telling_of_compilation("reroll.breakdown"):
        result, events = traced(step)
    gradients = [tensor.grad for tensor in owned if tensor.grad is not None]
    if not gradients:
        raise UnsupportedError(
            "breakdown found no gradient after the step. Give it the parameters that the step trains, and clear "
            "gradients at the beginning of the step, not at its end."
        )
    states = [] if optimizer is None else list(_states(optimizer))
    recurrences, rest = peak_of(events, addresses([*gradients, *states]))
    del result
    return Breakdown(_nbytes(owned), _nbytes(gradients), _nbytes(states), recurrences, rest)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from tensors_of(state)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory of tensors, where it is shared once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
