"""Functions that written files hold as they stand here. They use what those files import, and each other."""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import reroll


def made(
    shape: Sequence[int],
    dtype: torch.dtype,
    kind: str = "state",
    *,
    high: int = 2,
    strides: Sequence[int] = (),
    device: str = "cpu",
) -> torch.Tensor:
    """Random values. Whole numbers are in [0, high). A "state" is in [0, 1), an "input" has a normal distribution, a
    "weight" too, divided by the root of how many of them are added up. Dense without ``strides``."""
    count = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) if strides else None
    flat = (math.prod(shape) if count is None or 0 in shape else count,)
    if not dtype.is_floating_point and not dtype.is_complex:
        values = torch.randint(0, high, flat).to(dtype)
    elif kind == "state":
        values = torch.rand(flat).to(dtype)
    else:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        scale = math.prod(shape[1:]) ** -0.5 if kind == "weight" and 0 not in shape else 1.0
        values = (torch.randn(flat, dtype=wide) * scale).to(dtype)
    values = values.to(device)
    return values.as_strided(shape, strides) if strides else values.reshape(shape)


def versions() -> dict[str, str]:
    """What a run depends on beside the code."""
    return {
        "reroll": reroll.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "devices": ", ".join(torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())) or "cpu",
    }


def say_versions(written_with: Mapping[str, str]) -> None:
    """Both machines, side by side."""
    for name, here in versions().items():
        sys.stdout.write(f"{name:8} there: {written_with[name]:44} here: {here}\n")


def loss(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean square of each result, added up."""
    return torch.stack([each.abs().square().mean() for each in results if each.requires_grad]).sum()


def compare(loops: Sequence[Any], options: Mapping[str, Any], seed: int) -> int:
    """Train each loop once in eager PyTorch and by reroll, on one seed; 1 where something differs, else 0."""
    wrong = [loop for loop in loops if not equal(loop, of_loop(loop, options), seed)]
    return int(bool(wrong))


def equal(loop: Any, options: dict[str, Any], seed: int) -> bool:
    """Whether a loop gives the same results and gradients both ways; prints what differs."""
    torch.manual_seed(seed)
    model, inputs = loop(), loop.inputs()
    results = model(*inputs)
    if not all(bool(each.isfinite().all()) for each in results):
        sys.stdout.write(f"{loop.__name__}: eager's results are not finite. Change SEED, or what made() gives.\n")
        return False
    if loop.random and options.get("lowering", "inductor") == "inductor":
        loss(model.compiled(options)(*inputs)).backward()
        sys.stdout.write(f"{loop.__name__}: it ran. Inductor draws other random numbers: eager lowering is compared.\n")
        options["lowering"] = "eager"
    rounds = options.get("codec") in ("bfloat16", "int8")
    tolerance = 0.1 if rounds else 0.02 if loop.short else None  # gradients in float32 may be of products in bfloat16
    found = reroll.check(model.compiled(options), *inputs, measure=False, tolerance=tolerance)
    sys.stdout.write(f"{loop.__name__}: {found}\n")
    return found.equal


def of_loop(loop: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a loop. Where several had a budget together, its share are the bytes that its plan took there."""
    return {**options, **({"memory_budget": loop.share} if loop.share else {})}


def gradients(run: Callable[..., Any], leaves: Sequence[torch.Tensor], inputs: Sequence[Any], seed: int) -> list[Any]:
    """Those of one training step."""
    torch.manual_seed(seed)
    for leaf in leaves:
        leaf.grad = None
    loss(run(*inputs)).backward()
    return [leaf.grad for leaf in leaves]


def largest_error(before: Sequence[Any], after: Sequence[Any]) -> float:
    """How far gradients are off, relative to the largest entry of each tensor; infinite where one is missing."""
    found = 0.0
    for one, other in zip(before, after, strict=True):
        if (one is None) != (other is None):
            return math.inf
        if one is not None and one.numel():
            found = max(found, float((one - other).abs().max()) / max(float(one.abs().max()), 1e-30))
    return found


def race(loops: Sequence[Any], options: Mapping[str, Any], seed: int, only: Sequence[str]) -> None:
    """A table for each loop: what a training step takes in eager PyTorch, by torch.compile and by reroll.

    ``only``: the ways to run; all without. The first call compiles.
    """
    ways = ("eager", "inductor", "reroll")
    if not set(only) <= set(ways):
        raise SystemExit(f"Name some of the ways to run, or none for all of them: {' '.join(ways)}.")
    for loop in loops:
        torch.manual_seed(seed)
        model, inputs = loop(), loop.inputs()
        leaves = [each for each in (*model.parameters(), *inputs) if each.requires_grad]
        exact, runs, told = gradients(model, leaves, inputs, seed), {}, {}
        for name, run in (
            ("eager", model),
            ("inductor", torch.compile(model)),
            ("reroll", model.compiled(of_loop(loop, options))),
        ):
            if not only or name in only:
                runs[name] = functools.partial(gradients, run, leaves, inputs, seed)
                told[name] = first_call(runs[name], exact, leaves)
        seconds = in_turns(runs)
        sys.stdout.write(f"{loop.__name__}{' (random: compilers draw other numbers than eager)' * loop.random}\n")
        for name, text in told.items():
            sys.stdout.write(f"  {name:9} {1e3 * seconds[name]:9.2f} ms of CPU, {text}\n")


def first_call(run: Callable[[], Any], exact: Sequence[Any], leaves: Sequence[torch.Tensor]) -> str:
    """What the first training step took and gave, and the peak of a further one."""
    start = time.perf_counter()
    off = largest_error(exact, run())
    took = time.perf_counter() - start
    for leaf in leaves:
        leaf.grad = None
    peak = reroll.measure(run, exclude=leaves).local_peak
    return f"local peak {peak:13,} bytes, first call {took:6.1f} s, gradients off by {off:.0e}"


def in_turns(runs: Mapping[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """CPU seconds of each, the median of some rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}
