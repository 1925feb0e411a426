"""Where the time of a training step goes, and what its matrix products would take at this machine's best."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from measuring import Step
from torch._inductor.codecache import PyCodeCache

from reroll.passes.segment.pack_weights import CROSSOVER

KINDS = {
    "aten::mm": "products",
    "aten::addmm": "products",
    "aten::addmm_": "products",
    "aten::bmm": "products",
    "aten::mkldnn_convolution": "convolutions",
    "aten::convolution_backward": "convolutions",
    "reroll::event_product": "events",
    "reroll::event_outer": "events",
    "reroll::event_outer_add": "events",
    "packed_product": "products",
    "packed_events": "events",
    "cpp_fused": "fused",
}
WRAPPER = "CompiledFxGraph"


def profile(step: Step) -> dict[str, Any]:
    """Shares of the CPU time of one step whose kernels are called one by one, under torch's profiler, which adds to it.

    products, convolutions, events (but where what they look at is dense); fused: inductor's other kernels; wrapper: the
    Python code that calls these; rest.
    ``limit_s``: the multiplications of the dense products, at the rate of a product of 512 x 512 x 512 of torch's in
    the same process.
    """
    step()
    packed: list[int] = []
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
    with _named_kernels(packed), profiler as found:
        step()
    seconds = dict.fromkeys((*KINDS.values(), "wrapper", "rest"), 0.0)
    products = sum(packed)
    for event in found.events():
        kind = KINDS.get(event.name, "wrapper" if WRAPPER in event.name else "rest")
        seconds[kind] += event.self_cpu_time_total / 1e6
        if event.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = event.input_shapes[event.name != "aten::mm" :][:2]
            products += math.prod(left) * right[-1]
    whole = sum(seconds.values())
    shares = {kind: spent / whole for kind, spent in seconds.items()}
    return {"shares": shares, "multiplications": products, "limit_s": products / best_rate()}


@contextmanager
def _named_kernels(packed: list[int]) -> Iterator[None]:
    """Inside, the profiler sees the kernels that inductor's code calls; ``packed`` gets the multiplications of ours."""
    changed = {id(module): (vars(module), _named(vars(module), packed)) for module in PyCodeCache.modules}
    patches = [mock.patch.dict(names, made) for names, made in changed.values()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _named(names: dict[str, Any], packed: list[int]) -> dict[str, Callable[..., None]]:
    def named(kind: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            dense = kind == "packed_events" and bool(args[0].count_nonzero() > CROSSOVER * args[0].numel())
            if dense or kind == "packed_product":
                packed.append(math.prod(args[-1].shape) * args[1].shape[1])
            with torch.profiler.record_function("packed_product" if dense else kind):
                kernel(*args)

        return run

    kinds = ("packed_product", "packed_events", "cpp_fused")
    return {name: named(kind, value) for name, value in names.items() for kind in kinds if name.startswith(kind + "_")}


def best_rate(size: int = 512, rounds: int = 20) -> float:
    """Multiplications a second of a large product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        torch.mm(a, b)
        seconds.append(time.process_time() - begin)
    return size**3 / statistics.median(seconds)
