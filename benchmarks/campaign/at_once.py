"""Threads that call one compiled model at once, with other numbers of steps each: results and gradients are eager's."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from judge import TOLERANCE, Source, Verdict, Way, first_line, loaded, outcome

from reroll.graph.nested import tensors_of

STEPS = ((13, 21, 13, 6), (21, 13, 6, 21))
"""Of the calls of each thread, in order."""
_ZERO = 1e-13  # what is left of a gradient that is zero in exact numbers
Seen = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Given:
    """The inputs of calls of each number of steps, and parameters."""

    inputs: dict[int, tuple[torch.Tensor, torch.Tensor]]
    parameters: tuple[torch.Tensor, ...]

    def seen(self, model: Callable[..., Any], steps: int) -> Seen:
        """Results of a call, and gradients of their loss."""
        given = self.inputs[steps]
        made = list(tensors_of(model(*given)))
        loss = [each.sin().mul(at + 1).sum() for at, each in enumerate(made) if each.requires_grad]
        leaves = [each for each in (*given, *self.parameters) if each.requires_grad]
        grads = torch.autograd.grad(torch.stack(loss).sum(), leaves, allow_unused=True) if loss else ()
        return [*made, *grads]


def judge_at_once(program: Source, way: Way) -> Verdict:
    """What becomes of a model without states that threads call at once."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(program.seed)
    with tempfile.TemporaryDirectory() as folder:
        module = loaded(program.source(), Path(folder) / f"at_once{program.seed}.py")
        try:
            net, lengths = module.Net(), {each for steps in STEPS for each in steps}
            inputs = {
                steps: (
                    torch.randn(steps, 3, module.H_, requires_grad=True),
                    torch.randn(3, module.H_, requires_grad=True),
                )
                for steps in lengths
            }
            given = Given(inputs, tuple(net.parameters()))
            want = {steps: given.seen(net, steps) for steps in lengths}
        except Exception as error:  # the program is none  # noqa: BLE001
            return Verdict("invalid", first_line(error))
        compiled = way.compiled(net)
        return outcome(lambda: _differences(compiled, given, want))


def _differences(compiled: Callable[..., Any], given: Given, want: dict[int, Seen]) -> list[str]:
    """What differs in calls of all threads. Raises what one of them raised."""
    barrier, found, raised = threading.Barrier(len(STEPS)), list[str](), list[BaseException]()

    def calls(lengths: Sequence[int]) -> None:
        try:
            barrier.wait()
            for steps in lengths:
                found.extend(_unlike(given.seen(compiled, steps), want[steps], steps))
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=calls, args=(lengths,), daemon=True) for lengths in STEPS]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if raised:
        raise raised[0]
    return found


def _unlike(made: Seen, want: Seen, steps: int) -> Iterator[str]:
    """What differs from a call of eager."""
    if len(made) != len(want):
        yield f"{len(made)} tensors instead of {len(want)} at {steps} steps"
    for at, (one, other) in enumerate(zip(made, want, strict=False)):
        if one is None or other is None:
            if one is not other:
                yield f"tensor {at} of {steps} steps is {one} instead of {other}"
        elif one.shape != other.shape:
            yield f"tensor {at} of {steps} steps has shape {list(one.shape)}"
        elif one.numel() and (one - other).abs().max() > max(TOLERANCE * other.abs().max().item(), _ZERO):
            yield f"tensor {at} of {steps} steps differs"
