"""Where the time of a training step goes, and what its matrix products would take at this machine's best."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from measuring import Step

KINDS = {
    "aten::mm": "products",
    "aten::addmm": "products",
    "aten::bmm": "products",
    "aten::mkldnn_convolution": "convolutions",
    "aten::convolution_backward": "convolutions",
    "reroll::event_product": "events",
    "reroll::event_outer": "events",
}
FUSED = "CompiledFxGraph"


def profile(step: Step) -> dict[str, Any]:
    """Shares of the CPU time of one step, under torch's profiler, which adds to every call.

    products, convolutions, events; fused: inductor's other kernels and its Python wrapper; rest. ``limit_s``: the
    multiplications of the dense products, at the rate of a product of 512 x 512 x 512 in the same process.
    """
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as found:
        step()
    seconds = dict.fromkeys((*KINDS.values(), "fused", "rest"), 0.0)
    products = 0
    for event in found.events():
        kind = KINDS.get(event.name, "fused" if FUSED in event.name else "rest")
        seconds[kind] += event.self_cpu_time_total / 1e6
        if kind == "products":
            first = 1 if event.name == "aten::addmm" else 0
            left, right = event.input_shapes[first : first + 2]
            products += math.prod(left) * right[-1]
    whole = sum(seconds.values())
    shares = {kind: spent / whole for kind, spent in seconds.items()}
    return {"shares": shares, "multiplications": products, "limit_s": products / best_rate()}


def best_rate(size: int = 512, rounds: int = 20) -> float:
    """Multiplications a second of a large product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        torch.mm(a, b)
        seconds.append(time.process_time() - begin)
    return size**3 / statistics.median(seconds)
