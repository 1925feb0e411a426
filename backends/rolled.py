"""A recurrence as one node of the autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reroll.backends.executable import Executable
from reroll.backends.runtime import Run
from reroll.errors import UnsupportedError
from reroll.recurrence import Recurrence


class Rolled(nn.Module):
    """Calls a compiled recurrence: ``(initial carry..., operands...) -> (last carry..., ys...)``."""

    def __init__(self, executable: Executable) -> None:
        super().__init__()
        self.executable = executable

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run it. Raises UnsupportedError under ``torch.func`` transforms."""
        where = self.executable.recurrence.where
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnsupportedError(
                f"torch.func transforms (grad, vmap, jacrev, ...) cannot go through the compiled recurrence at "
                f"{where}. Apply them to the plain model, outside of torch.compile."
            )
        result: tuple[Tensor, ...] = _Reversible.apply(self.executable, *operands)  # type: ignore[no-untyped-call]
        return result


class Idle(nn.Module):
    """A recurrence of no steps: its last carry is its first, and there are no outputs.

    ``results`` are those of a segment.
    """

    def __init__(self, recurrence: Recurrence, results: Sequence[Tensor]) -> None:
        super().__init__()
        self.carries = len(recurrence.carries)
        self.rows = results[self.carries :]

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """The first carry, and no rows."""
        empty = (torch.empty((0, *row.shape[1:]), dtype=row.dtype, device=row.device) for row in self.rows)
        return (*operands[: self.carries], *empty)


class _Reversible(torch.autograd.Function):
    """The forward plays the first half of the program, the backward the second."""

    @staticmethod
    def forward(ctx: Any, executable: Executable, *operands: Tensor) -> tuple[Tensor, ...]:
        carried = len(executable.recurrence.carries)
        plain = [operand.detach() for operand in operands]
        plain[:carried] = [carry.contiguous() for carry in plain[:carried]]
        loose = executable.recurrence.loose
        examples = enumerate(executable.recurrence.examples)
        laid_out = [plain[i] if i in loose else conform(plain[i], like) for i, like in examples]
        run = Run(executable, laid_out)
        with torch.autocast(_device(plain), enabled=False):
            last, ys = run.forward(training=any(ctx.needs_input_grad))
        ctx.set_materialize_grads(False)
        ctx.run = run
        ctx.save_for_backward(*operands)
        results = (*(tensor.clone() for tensor in last), *ys)
        ctx.mark_non_differentiable(
            *(r for i, r in enumerate(results) if i not in next(iter(executable.segments.values())).tangents)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        run: Run | None = ctx.run
        if torch.is_grad_enabled():
            where = run.executable.recurrence.where if run else "this model"
            raise UnsupportedError(
                f"Double backward (create_graph=True) through the compiled recurrence at {where} is not supported. "
                "Use the plain model for it, outside of torch.compile."
            )
        operands = ctx.saved_tensors  # raises if an operand was changed in place since the forward
        if run is None:
            raise UnsupportedError(
                "This recurrence was reversed already, and its tape is gone. Call backward(retain_graph=True) the "
                "first time."
            )
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.run = run if keep else None
        with torch.autocast(_device(operands), enabled=False):
            results = run.backward(grads, keep)
        return (None, *(grad if need else None for grad, need in zip(results, ctx.needs_input_grad[1:], strict=True)))


def conform(value: Tensor, like: Tensor) -> Tensor:
    """The value in the layout that the segments were compiled for; itself where it has that layout."""
    if value.stride() == like.stride():
        return value
    return torch.empty_strided(value.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _device(tensors: Any) -> str:
    return next((tensor.device.type for tensor in tensors), "cpu")
