"""Train a network eagerly and beside it a compiled twin, and compare all that can be seen after every optimizer step.

A *door* is a way to compile: ``(model, options) -> callable``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import reroll
import reroll.backends.construct.kernels as build
import reroll.backends.dynamo.entry as dynamo
from agreement import Results, differences, real
from reroll.capture.capture import capture as capture_graph
from reroll.errors import RerollWarning
from reroll.program.registry import run_on_loops
from reroll.recurrence import Capture
from reroll.segment.trace import trace as trace_segment

Run = Callable[..., Any]
Door = Callable[[nn.Module, Mapping[str, Any]], Run]
BATCHES = 3
_SEGMENTS = {"lowering": "eager", "segment": 2}
_TWO_LEVELS = {**_SEGMENTS, "chunk": 4, "slots": 2}
SCHEDULES: tuple[Mapping[str, Any], ...] = (
    {**_SEGMENTS, "schedule": "store_all", "replay": True},
    {**_SEGMENTS, "schedule": "standard", "chunk": 4},
    {**_TWO_LEVELS, "schedule": "hierarchical", "remote": "disk"},
    {**_TWO_LEVELS, "schedule": "double", "remote": "disk", "verify": True},
    {**_TWO_LEVELS, "schedule": "double", "remote": "local"},
)


def nothing(model: nn.Module) -> None:
    """Between batches: leave the model as it is."""


@dataclass(frozen=True)
class Case:
    """A network: ``make`` builds it in the default dtype, ``inputs(steps)`` gives one batch for it.

    time: the dimension of sequences that is time. reset: what the user does between batches. restart: what makes the
    model's state new, if ``reset`` does not. dtype: float64 unless the library cannot. tolerance: relative to the
    largest entry of each tensor. loops: steps of each recurrence found in the first batch when it runs ``steps``.
    lengths: others at which it must work. settings: of Dynamo.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    loops: tuple[int, ...]
    time: int = 0
    reset: Callable[[nn.Module], Any] = nothing
    restart: Callable[[nn.Module], Any] = nothing
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    steps: int = 9
    lengths: tuple[int, ...] = (4, 13)
    leaf: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.dtype == torch.float64 or self.tolerance > 1e-12

    def lengthwise(self, steps: int) -> list[tuple[Any, ...]]:
        """A few batches of one length, the same ones at every call."""
        torch.manual_seed(5)
        return [self.inputs(steps) for _ in range(BATCHES)]


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of this dtype by default."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def built(case: Case) -> nn.Module:
    """The network of a case, with the same parameters at every call."""
    torch.manual_seed(4)
    return case.make()


def state(model: nn.Module) -> Results:
    """Every tensor that a model holds besides its parameters: buffers, and attributes that hold states."""
    found = {name: value for name, value in model.named_buffers() if value is not None}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
                found |= {f"{path}.{name}[{i}]": tensor for i, tensor in enumerate(tensors)}
    return {f"state {name}": value.detach().clone() for name, value in found.items()}


def loss_of(outputs: list[Tensor]) -> Any:
    """A number that depends on every entry of every output in a way of its own."""
    return sum(((i + 1) * real(value).pow(2)).mean() + real(value).sin().mean() for i, value in enumerate(outputs))


def train(run: Run, model: nn.Module, case: Case, batches: Sequence[tuple[Any, ...]]) -> list[Results]:
    """What can be seen after each step: outputs, loss, gradients, state, parameters, the next random number."""
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if list(model.parameters()) else None
    for number, batch in enumerate(batches):
        case.reset(model)
        model.zero_grad()
        torch.manual_seed(number)
        given = tree_map(lambda v: v.clone().requires_grad_(v.is_floating_point()), batch)
        passed = given if case.leaf else tree_map(lambda v: v * 1, given)
        made = [value for value in tree_leaves(run(*passed)) if isinstance(value, Tensor)]
        loss = loss_of(made)
        loss.backward()
        now = {f"output {i}": value.detach() for i, value in enumerate(made)} | {"loss": loss.detach()}
        now |= {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        now |= {f"input {i}": v.grad for i, v in enumerate(tree_leaves(given)) if v.grad is not None}
        if optimizer is not None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        now |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
        seen.append(now | state(model) | {"next random number": torch.rand(())})
    return seen


def plainly(case: Case, batches: Sequence[tuple[Any, ...]]) -> list[Results]:
    """Training by eager autograd."""
    model = built(case)
    return train(model, model, case, batches)


def disagreements(found: list[Results], expected: list[Results], tolerance: float) -> list[str]:
    """What differs, with the number of the batch."""
    pairs = enumerate(zip(found, expected, strict=True))
    return [f"batch {at}: {text}" for at, (a, b) in pairs for text in differences(a, b, tolerance)]


def through_backend(model: nn.Module, options: Mapping[str, Any]) -> Run:
    """The door ``torch.compile(model, backend="reroll")``."""
    run: Run = torch.compile(model, backend="reroll", fullgraph=True, options=dict(options))
    return run


def through_front_door(model: nn.Module, options: Mapping[str, Any]) -> Run:
    """The door ``reroll.compile(model)``."""
    run: Run = reroll.compile(model, **options)
    return run


def compare(case: Case, door: Door, options: Mapping[str, Any], lengths: Sequence[int]) -> list[str]:
    """What differs from eager when one compiled model trains on batches of these lengths, one after another."""
    with precision(case.dtype), quiet(case):
        batches = [batch for steps in lengths for batch in case.lengthwise(steps)]
        expected = plainly(case, batches)
        twin = built(case)
        return disagreements(train(door(twin, options), twin, case, batches), expected, case.tolerance)


@contextmanager
def quiet(case: Case) -> Iterator[None]:
    """Dynamo as the case needs it, without the warnings that reroll gives where it finds nothing to roll."""
    with warnings.catch_warnings(), torch._dynamo.config.patch(**case.settings):
        warnings.simplefilter("ignore", RerollWarning)
        yield


def compare_schedules(case: Case) -> tuple[dict[str, list[str]], tuple[int, ...]]:
    """What differs from eager under each of ``SCHEDULES``, and the steps of the recurrences of the first batch.

    Dynamo's trace and the segments take most of the time, so the schedules share them: a graph is compiled for all of
    them, of which one runs.
    """
    with precision(case.dtype), quiet(case), compiled_once() as made:
        batches = case.lengthwise(case.steps)
        expected = plainly(case, batches)
        twin, chosen = built(case), [0]
        start = copy.deepcopy(twin.state_dict())
        run: Run = torch.compile(twin, backend=partial(_all_of, chosen), fullgraph=True)
        found = {}
        for number, options in enumerate(SCHEDULES):
            chosen[0] = number
            case.restart(twin)
            twin.load_state_dict(start)
            found[str(options)] = disagreements(train(run, twin, case, batches), expected, case.tolerance)
        return found, tuple(recurrence.steps for recurrence in made[0].recurrences)


def _all_of(chosen: list[int], gm: Any, inputs: Any) -> Run:
    runs = [dynamo.reroll(gm, inputs, options=options) for options in SCHEDULES]
    return lambda *args: runs[chosen[0]](*args)


@contextmanager
def compiled_once() -> Iterator[list[Capture]]:
    """A graph is captured and fused and a segment traced once, and compiled once with and without replay.

    Gives the captures.
    """
    made: list[Capture] = []
    graphs: dict[Any, Capture] = {}
    kernels: dict[Any, Any] = {}
    traces: dict[Any, Any] = {}
    inner_capture, inner_compile, inner_trace = capture_graph, build.compile_kernels, trace_segment

    def capture(gm: Any, **options: Any) -> Capture:
        if gm not in graphs:
            graphs[gm] = inner_capture(gm, **options)
            made.append(graphs[gm])
        return graphs[gm]

    def compile_kernels(recurrence: Any, options: Any, lengths: Any, loops: int = 1, known: Any = None) -> Any:
        key = (recurrence, tuple(lengths), options.replay, loops)
        if key not in kernels:
            with mock.patch.object(build, "trace", partial(trace, recurrence)):
                kernels[key] = inner_compile(recurrence, options, lengths, loops, known)
        return kernels[key]

    def trace(original: Any, recurrence: Any, steps: int, **how: Any) -> Any:
        if (original, steps) not in traces:
            traces[original, steps] = inner_trace(recurrence, steps, **how)
        return traces[original, steps]

    with (
        mock.patch.object(dynamo, "capture", capture),
        mock.patch.object(dynamo, "run_on_loops", cache(run_on_loops)),
        mock.patch.object(build, "compile_kernels", compile_kernels),
    ):
        yield made
