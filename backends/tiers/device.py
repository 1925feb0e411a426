"""Devices that work in the background: queues of work (streams), marks in them (events), and memory they can reach.

What the host tier and the staging of the disk tier need of a device is this protocol, in CUDA's words, so that tests
can put a simulated device in its place.
"""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from reroll.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


_RECORDING = threading.Lock()  # torch records one graph at a time


class Placed(Protocol):
    """What lies on a device."""

    @property
    def device(self) -> torch.device:
        """The device."""


class Event(Protocol):
    """A mark in a stream: it is over once all is done that was queued before it."""

    def synchronize(self) -> None:
        """Let this thread wait until it is over."""


class Stream(Protocol):
    """A queue of work that is done in order."""

    def record_event(self) -> Event:
        """Mark the end of what is queued so far."""

    def wait_event(self, event: Event) -> None:
        """Let what is queued from now on wait for an event of any stream. This thread does not wait."""


class Device(Protocol):
    """One device. What it allocates is freed behind the work of the stream that was the present one then."""

    def present(self) -> Stream:
        """The stream on which this thread queues its work."""

    def side(self) -> Stream:
        """A new stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Bytes of the computer's memory that the device can reach. Raises RuntimeError if there are none left."""

    def room(self, like: Tensor) -> Tensor:
        """Uninitialised memory of the device, of the shape and type of a tensor."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Queue a copy of bytes between the device and pinned memory."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds until the device has done some work, and nothing else."""

    def workspace(self) -> int:
        """Bytes that libraries keep for products of one thread's recordings, for good."""

    def watched(self, run: Callable[[], list[Tensor | None]]) -> tuple[list[Tensor | None], bool]:
        """The results of ``run``, and whether anything waited for the device meanwhile."""

    def record(self, run: Callable[[], list[Tensor | None]]) -> tuple[list[Tensor | None], Callable[[], None]]:
        """Record the work that ``run`` queues, which is not done now. Gives its results, and what does the work, each
        time anew in the same memory. Raises RuntimeError if it cannot be recorded."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device. Its recordings are CUDA graphs, made on one stream in one pool of memory."""

    device: torch.device
    _made: list[Any] = field(default_factory=list)  # the pool and the stream, once there are recordings
    _graphs: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # which are in the pool

    def present(self) -> Stream:
        """As ``Device`` says."""
        return cast(Stream, torch.cuda.current_stream(self.device))

    def side(self) -> Stream:
        """As ``Device`` says."""
        return cast(Stream, torch.cuda.Stream(self.device))

    def pinned(self, nbytes: int) -> Tensor:
        """As ``Device`` says."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def room(self, like: Tensor) -> Tensor:
        """As ``Device`` says."""
        return torch.empty_like(like, device=self.device)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """As ``Device`` says."""
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            target.copy_(source, non_blocking=True)

    def seconds(self, work: Callable[[], object]) -> float:
        """As ``Device`` says, on the wall."""
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin

    def workspace(self) -> int:
        """As ``Device`` says: cuBLAS's, of which torch makes one for each thread and stream, of the size that
        ``parseChosenWorkspaceSize`` says (``aten/src/ATen/cuda/CublasHandlePool.cpp``)."""
        chosen = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if not chosen:
            hopper = torch.cuda.get_device_capability(self.device) == (9, 0)
            chosen = [(4096, 8)] if hopper else [(4096, 2), (16, 8)]
        return sum(1024 * int(size) * int(count) for size, count in chosen)

    def watched(self, run: Callable[[], list[Tensor | None]]) -> tuple[list[Tensor | None], bool]:
        """As ``Device`` says: torch warns of what waits."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as told:  # torch warns of the mode itself, too
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                results = run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [each for each in told if "synchronizing CUDA operation" in str(each.message)]
        for each in told:
            if each not in waits and "Synchronization debug mode" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return results, bool(waits)

    def record(self, run: Callable[[], list[Tensor | None]]) -> tuple[list[Tensor | None], Callable[[], None]]:
        """As ``Device`` says. Where that fails, torch stays on the stream of the recording, and its generator of random
        numbers believes that it is recorded (2.11): we go back."""
        here = torch.cuda.current_stream(self.device)
        numbers = torch.cuda.default_generators[self.device.index]
        before = numbers.get_state()
        with _RECORDING, torch.cuda.device(self.device), torch.cuda.stream(here):
            alive = next(iter(self._graphs), None)  # held here: torch uses no pool again whose graphs are all gone
            if not self._made:
                self._made.extend((torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)))
            elif alive is None:
                self._made[0] = torch.cuda.graph_pool_handle()
            pool, stream = self._made
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    results = run()
            except BaseException:
                self._made.clear()  # torch may believe that its pool is being recorded to
                self._graphs.clear()
                fresh = torch.Generator(self.device)
                fresh.set_state(before)
                numbers.graphsafe_set_state(fresh.graphsafe_get_state())
                raise
            self._graphs.add(graph)
        return results, graph.replay


KINDS: dict[str, Callable[[torch.device], Device]] = {"cuda": CudaDevice}
"""Devices that work in the background, by the type of ``torch.device``. On all others copies are done at once."""


@cache
def device_of(device: torch.device) -> Device | None:
    """The device behind a ``torch.device`` with an index; None where work is done at once, as on a CPU."""
    kind = KINDS.get(device.type)
    return kind(device) if kind else None


def home_of(values: Sequence[Placed]) -> torch.device:
    """Where a loop works: the device of its values that works in the background, if there is one, else the first's."""
    return background_of(values) or values[0].device


def background_of(values: Sequence[Placed]) -> torch.device | None:
    """The device that works in the background among those of some values; None if there is none.

    Raises UnsupportedError if there are two.
    """
    found = sorted({value.device for value in values if device_of(value.device)}, key=str)
    if len(found) > 1:
        raise UnsupportedError(
            f"A loop has values on several devices ({', '.join(map(str, found))}). Keep a whole step on one device."
        )
    return found[0] if found else None
