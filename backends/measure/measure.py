"""What a call costs, measured: local memory and time.

Memory is read from the allocator: on a CPU the events of ``torch.profiler`` (every allocation of the calling thread,
inductor's included; torch 2.13 reports memory per thread, and autograd runs a CPU backward in the thread that asks for
it), on CUDA the allocator's history. What bypasses torch's allocators (numpy, the scratch of a BLAS) is not seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reroll.backends.construct.stages.takeover import measuring
from reroll.backends.measure.events import Event, addresses, peak_of
from reroll.backends.measure.history import traced_on_cards
from reroll.backends.progress import telling_of_compilation

_LEVEL = "KINETO_LOG_LEVEL"
_RECURRENCES = ("_Reversible", "_ReversibleBackward")  # the autograd node of ``reroll.backends.runtime.node``


@dataclass(frozen=True, slots=True)
class Measurement:
    """``local_peak`` in bytes; ``seconds`` of CPU time of the whole process and ``wall_seconds``, each of one call;
    ``result`` is what the timed call gave."""

    local_peak: int
    seconds: float
    wall_seconds: float
    result: Any


def measure(fn: Callable[[], Any], exclude: Iterable[nn.Module | Tensor] = ()) -> Measurement:
    """Call ``fn`` twice, once for memory and once for time, as a profiler would disturb the clock.

    The peak counts the bytes that the call allocates and has not freed yet, on all CUDA devices if there is one that is
    in use, else on the CPU. What was alive before does not count, nor does freeing it. ``exclude`` names modules and
    tensors (parameters, inputs) whose ``.grad`` does not count where the call makes it: clear those gradients first,
    ``optimizer.zero_grad()``, as gradients that are there already are added to, and what is added is local memory.
    Warm up before: compilation at the first call would count, of which a RerollWarning tells. ``reroll.compile`` looks
    at a model again at its 2nd, 4th, 8th ... call of a shape, which holds what a call without gradients does; in a call
    that is measured it does not.
    """
    tensors = list(_tensors(exclude))
    before = {id(tensor): tensor.grad for tensor in tensors}
    return measured(fn, lambda _: [t.grad for t in tensors if t.grad is not None and t.grad is not before[id(t)]])


def measured(fn: Callable[[], Any], made: Callable[[Any], Iterable[Tensor]]) -> Measurement:
    """``measure``, where ``made`` gives of a call's result the tensors whose memory does not count."""
    on_gpu = any(torch.cuda.memory_allocated(device) for device in _devices())
    with measuring():
        with telling_of_compilation("reroll.measure"):
            peak = (_cuda_peak if on_gpu else _cpu_peak)(fn, made)
        wall, seconds = time.perf_counter(), time.process_time()
        result = fn()
        settle()
    return Measurement(peak, time.process_time() - seconds, time.perf_counter() - wall, result)


def _tensors(given: Iterable[nn.Module | Tensor]) -> Iterator[Tensor]:
    for each in given:
        yield from each.parameters() if isinstance(each, nn.Module) else (each,)


def _cpu_peak(fn: Callable[[], Any], made: Callable[[Any], Iterable[Tensor]]) -> int:
    result, events = traced(fn)
    left_out = addresses(made(result))
    del result
    return sum(peak_of(events, left_out))


def traced(fn: Callable[[], Any]) -> tuple[Any, list[Event]]:
    """What a call gives, and the memory events of the CPU during it, in order of time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _quiet(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = fn()
    profiler: Any = profile.profiler
    events = _events(profiler.kineto_results.experimental_event_tree())
    return result, sorted(events, key=lambda event: event.nanoseconds)


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler of torch 2.13 announces its starts and stops below level 6, which it reads when it first runs."""
    if _LEVEL in os.environ:
        yield
        return
    os.environ[_LEVEL] = "6"
    try:
        yield
    finally:
        os.environ.pop(_LEVEL, None)


def _events(tree: Iterable[Any]) -> Iterator[Event]:
    todo = [(event, False) for event in tree]
    while todo:
        event, inside = todo.pop()
        inside = inside or event.name in _RECURRENCES
        todo.extend((child, inside) for child in event.children)
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            yield Event(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, inside)


def _cuda_peak(fn: Callable[[], Any], made: Callable[[Any], Iterable[Tensor]]) -> int:
    result, traces = traced_on_cards(fn, settle)
    left_out = addresses(each for each in made(result) if each.is_cuda)
    del result
    return sum(sum(peak_of(events, left_out)) for events in traces)


def _devices() -> range:
    """The CUDA devices, if this process uses any."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


def settle() -> None:
    """Wait for what was left to CUDA devices."""
    for device in _devices():
        torch.cuda.synchronize(device)
