"""Run a network eagerly and compiled, and compare all that comes out: outputs, gradients, buffers, random numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import reroll.backends.dynamo.entry as dynamo
from reroll.capture.capture import capture as capture_graph
from reroll.errors import RerollWarning
from reroll.recurrence import Capture
from walks import Shared

Results = dict[str, Tensor]
Run = Callable[..., Any]
QUICK: dict[str, Any] = {"lowering": "eager", "segment": 2}  # tracing segments takes most of the time


def results(run: Run, model: nn.Module, inputs: Any, *, leaf: bool = True, calls: int = 1) -> Results:
    """Outputs, gradients and buffers of some calls with a backward each, and the random number that comes next."""
    model.zero_grad()
    torch.manual_seed(3)
    given = tree_map(lambda v: v.clone().requires_grad_(v.is_floating_point()), inputs)
    outputs: list[Tensor] = []
    for _ in range(calls):
        passed = given if leaf else tree_map(lambda v: v * 1, given)
        made = [value for value in tree_leaves(run(*passed)) if isinstance(value, Tensor)]
        outputs += made
        loss = sum((i + 1) * real(value).pow(2).sum() for i, value in enumerate(made))
        assert isinstance(loss, Tensor)
        if loss.requires_grad:
            loss.backward()
    named = {f"output {i}": value.detach() for i, value in enumerate(outputs)}
    named |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    named |= {f"input {i}": v.grad for i, v in enumerate(tree_leaves(given)) if v.grad is not None}
    named |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return named | {"next random number": torch.rand(())}


def real(value: Tensor) -> Tensor:
    """A tensor in float64; of complex numbers the magnitude."""
    return (value.abs() if value.is_complex() else value).to(torch.float64)


def differences(found: Results, expected: Results, tolerance: float = 1e-12) -> list[str]:
    """What differs, relative to the largest value of each tensor; a gradient of zeros may be missing."""
    texts = []
    for name in sorted({*found, *expected}):
        if name not in found or name not in expected:
            value = found.get(name, expected.get(name))
            texts += [] if value is None or not value.any() else [f"{name}: only in one"]
            continue
        a, b = found[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            texts.append(f"{name}: {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}")
        elif a.numel():
            wide = torch.complex128 if a.is_complex() else torch.float64
            error = ((a.to(wide) - b.to(wide)).abs().max() / (real(b).abs().max() + 1e-30)).item()
            texts += [] if error <= tolerance else [f"{name}: {error:.1e}"]
    return texts


@contextmanager
def captures() -> Any:
    """A list that fills with every capture made inside."""
    made: list[Capture] = []
    inner = capture_graph

    def capture(*args: Any, **kwargs: Any) -> Capture:
        made.append(inner(*args, **kwargs))
        return made[-1]

    with mock.patch.object(dynamo, "capture", capture):
        yield made


def compare(
    model: nn.Module, inputs: Any, *, leaf: bool = True, calls: int = 1, tolerance: float = 1e-12, **options: Any
) -> tuple[list[str], list[Capture]]:
    """What differs between eager and compiled, and what was captured."""
    twin = copy.deepcopy(model)
    expected = results(model, model, inputs, leaf=leaf, calls=calls)
    with captures() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        run = Shared(twin, {**QUICK, **options})
        found = results(run, twin, inputs, leaf=leaf, calls=calls)
    return differences(found, expected, tolerance), made


def sizes(made: list[Capture]) -> tuple[tuple[int, int], ...]:
    """(steps, carries) of every recurrence."""
    return tuple((r.steps, len(r.carries)) for capture in made for r in capture.recurrences)
