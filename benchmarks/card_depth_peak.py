"""The peak of a training step on a card without the gradients of parameters, from the allocator's own history.

``CudaMeter.cost`` takes all gradients off the highest counter. That is too much where the peak comes before they are
made: of a GPT of 24 blocks of width 1,024 they are 1.2 GB, and eager's peak is at the beginning of the backward, when
none of them is there. Here every allocation and release of the step is replayed, as ``reroll.measure`` does on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from measuring import Step
from torch import nn

from reroll.backends.measure.measure import Event, addresses, peak_of

_SIGNS = {"alloc": 1, "free_requested": -1}  # where max_memory_allocated counts, too: a block is gone when it is asked


def replayed_peak(step: Step, model: nn.Module, device: torch.device) -> int:
    """Bytes above what was there before, of one step that was warmed up.

    The history is private API of torch (2.1 to 2.11 have this form of it), and there is no public one.
    """
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
    try:
        step()
        torch.cuda.synchronize(device)
        snapshot: Mapping[str, Any] = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    made = addresses(each.grad for each in model.parameters() if each.grad is not None)
    return sum(peak_of(events_of(snapshot["device_traces"][device.index or 0]), made))


def events_of(trace: Iterable[Mapping[str, Any]]) -> list[Event]:
    """The allocations and releases of a trace, in order. Raises ValueError if there are none."""
    told = [each for each in trace if each["action"] in _SIGNS]
    if not told:
        raise ValueError("The history of the allocator tells of no allocation.")
    return [
        Event(number, each["addr"], _SIGNS[each["action"]] * each["size"], False) for number, each in enumerate(told)
    ]
