"""A recurrence as one node of the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reroll.backends.executable import Executable
from reroll.backends.runtime import Run
from reroll.errors import ShortageError, UnsupportedError
from reroll.recurrence import Recurrence


class Rolled(nn.Module):
    """Calls a compiled recurrence: ``(initial carry..., operands...) -> (last carry..., ys...)``.

    ``executable`` may be replaced between calls. ``cheaper`` replaces it by one that needs less memory, where memory
    ran out: it is told in which half, and the error. It raises ShortageError if there is none.
    """

    def __init__(self, executable: Executable, cheaper: Callable[[str, str], None] | None = None) -> None:
        super().__init__()
        self.executable = executable
        self.cheaper = cheaper

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run it. Raises UnsupportedError under ``torch.func`` transforms."""
        where = self.executable.recurrence.where
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnsupportedError(
                f"torch.func transforms (grad, vmap, jacrev, ...) cannot go through the compiled recurrence at "
                f"{where}. Apply them to the plain model, outside of torch.compile."
            )
        training = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        result: tuple[Tensor, ...] = _Reversible.apply(self, training, *operands)  # type: ignore[no-untyped-call]
        return result

    def played(self, operands: Sequence[Tensor], training: bool) -> tuple[Run, tuple[list[Tensor], list[Tensor]]]:
        """The forward half of a call, and what it gives. Where memory runs out it starts anew with a cheaper plan."""
        while True:
            run = Run(self.executable, operands)
            try:
                return run, run.forward(training)
            except (RuntimeError, MemoryError) as error:
                if not training or self.cheaper is None or not is_shortage(error):
                    raise
                shortage = str(error)
            run.rewind()
            del run
            self.cheaper("forward", shortage)

    def reversed(
        self, holder: list[Run], grads: Sequence[Tensor | None], keep: bool
    ) -> tuple[Run, list[Tensor | None]]:
        """The backward half of the run in ``holder``, which is taken out, and what it gives.

        Where memory runs out all that the run holds is freed, and the call is played again from its operands with a
        cheaper plan; gradients are handed on only once all are there.
        """
        run = holder.pop()
        while True:
            try:
                return run, run.backward(grads, keep)
            except (RuntimeError, MemoryError) as error:
                if self.cheaper is None or not is_shortage(error):
                    raise
                shortage = str(error)
            begun = run.begun()
            del run
            run = self._restarted(begun, shortage)

    def _restarted(self, begun: Run, shortage: str) -> Run:
        assert self.cheaper is not None
        while True:
            self.cheaper("backward", shortage)
            try:
                return begun.again(self.executable)
            except (RuntimeError, MemoryError) as error:
                if not is_shortage(error):
                    raise
                shortage = str(error)


def is_shortage(error: Exception) -> bool:
    """Whether an error says that memory could not be allocated; on a CPU torch raises a RuntimeError."""
    if isinstance(error, ShortageError):
        return False
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


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
    def forward(ctx: Any, rolled: Rolled, training: bool, *operands: Tensor) -> tuple[Tensor, ...]:
        executable = rolled.executable
        carried = len(executable.recurrence.carries)
        plain = [operand.detach() for operand in operands]
        plain[:carried] = [carry.contiguous() for carry in plain[:carried]]
        loose = executable.recurrence.loose
        examples = enumerate(executable.recurrence.examples)
        laid_out = [plain[i] if i in loose else conform(plain[i], like) for i, like in examples]
        with torch.autocast(_device(plain), enabled=False):
            run, (last, ys) = rolled.played(laid_out, training)
        ctx.set_materialize_grads(False)
        ctx.rolled, ctx.run = rolled, run
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
        holder, ctx.run = [run], None
        del run
        with torch.autocast(_device(operands), enabled=False):
            played, results = ctx.rolled.reversed(holder, grads, keep)
        ctx.run = played if keep else None
        given = zip(results, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(grad if need else None for grad, need in given))


def conform(value: Tensor, like: Tensor) -> Tensor:
    """The value in the layout that the segments were compiled for; itself where it has that layout."""
    if value.stride() == like.stride():
        return value
    return torch.empty_strided(value.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _device(tensors: Any) -> str:
    return next((tensor.device.type for tensor in tensors), "cpu")
