"""What a training step costs on a device: bytes, and seconds until the device is done."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Protocol

import torch
from measuring import Step, aside, cost_of
from torch import nn

from reroll.backends.tiers.available import free_bytes

_EVERYBODYS = (0, 0)  # the pool of all that is not recorded


@dataclass(frozen=True)
class Cost:
    """``local_peak_bytes`` above what was there before, without gradients of parameters; ``seconds`` of the step."""

    local_peak_bytes: int
    seconds: float


class Meter(Protocol):
    """How steps are measured on a device; ``clock`` is ``wall`` or ``cpu``. ``kept``: bytes of libraries, for good."""

    device: torch.device
    clock: str
    kept: int

    def seconds(self, step: Step) -> float:
        """Seconds of a step, or what it tells itself."""

    def cost(self, step: Step, network: nn.Module) -> Cost:
        """Bytes and seconds of a step that was warmed up, without the gradients of ``network`` that it makes."""

    def allocated(self) -> int:
        """Bytes that are allocated on the device now; 0 where the meter of a step sees all that it holds."""

    def working(self) -> int:
        """Bytes in which recorded kernels work: they belong to recordings, and torch's counters call them free."""

    def room(self) -> int | None:
        """Bytes that could be allocated. None where no system says it."""

    def settle(self) -> None:
        """Wait for the device, and free what is no longer used."""


class CpuMeter:
    """CPU seconds of the process, and the allocator's events as ``reroll.measure`` reads them."""

    device, clock = torch.device("cpu"), "cpu"
    kept = 0

    def seconds(self, step: Step) -> float:
        """CPU seconds of all threads of the process."""
        begin = time.process_time()
        told = step()
        return time.process_time() - begin if told is None else told

    def cost(self, step: Step, network: nn.Module) -> Cost:
        """Runs the step twice, as the profiler disturbs the clock."""
        network.zero_grad(set_to_none=True)
        found = cost_of(step, [network])
        return Cost(found.local_peak, found.seconds)

    def allocated(self) -> int:
        """Nothing is held from step to step."""
        return 0

    def working(self) -> int:
        """Nothing is recorded."""
        return 0

    def room(self) -> int | None:
        """What the system leaves."""
        return free_bytes(self.device)

    def settle(self) -> None:
        """Nothing is left to the device."""
        gc.collect()


class CudaMeter:
    """Seconds on the wall with the device idle before and after, and the history of torch's allocator."""

    clock = "wall"

    def __init__(self, device: torch.device) -> None:
        self.device, self.kept = device, 0

    def seconds(self, step: Step) -> float:
        """Seconds until the device has done all that the step asked of it."""
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        told = step()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin if told is None else told

    def cost(self, step: Step, network: nn.Module) -> Cost:
        """Runs the step three times, as ``reroll.measure`` does twice. The pool stays as the warm-up left it: to grow
        it takes time.
        """
        network.zero_grad(set_to_none=True)
        gc.collect()
        peak = cost_of(step, [network]).local_peak
        network.zero_grad(set_to_none=True)
        with aside():
            return Cost(peak, self.seconds(step))

    def allocated(self) -> int:
        """What tensors have, and recorded graphs."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)

    def working(self) -> int:
        """What the pools of recordings have beside their tensors."""
        segments = (each for each in torch.cuda.memory_snapshot() if each["device"] == self.device.index)
        recorded = (each for each in segments if tuple(each["segment_pool_id"]) != _EVERYBODYS)
        return sum(each["total_size"] - each["allocated_size"] for each in recorded)

    def room(self) -> int | None:
        """What the driver and torch's own pool have."""
        return free_bytes(self.device)

    def settle(self) -> None:
        """Give the pool back, so that each contender starts with the same one. Raises what the device failed with."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


def meter_of(device: torch.device) -> Meter:
    """The meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()
