"""A recurrence as one node of the autograd graph.

Private torch API, tried on 2.11 and 2.13: ``_functorch.peek_interpreter_stack`` (whether a transform of ``torch.func``
runs), ``_get_current_graph_task_keep_graph`` (whether this backward was called with ``retain_graph``).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reroll.backends.runtime.executable import Executable
from reroll.backends.runtime.reach import Classes, Parts, classes_of, spare_hooks
from reroll.backends.runtime.run import Run, Start, again, as_traced
from reroll.backends.runtime.shown import Links, joined
from reroll.backends.runtime.undefined_grads import Unused, differentiable_inputs, needing, tells_rows, used_of
from reroll.errors import ShortageError, UnsupportedError, is_shortage
from reroll.graph.private import without_hooks_of_all_modules
from reroll.recurrence import Items

_BEFORE = 4  # what the node is given before operands


class RecurrenceModule(nn.Module):
    """Calls a compiled recurrence: ``(initial carry..., operands...) -> (last carry..., ys...)``.

    ``executable`` may be replaced between calls. ``cheaper`` replaces it by one that needs less memory, where memory
    ran out: it is told in which half, and the error. It raises ShortageError if there is none. ``own_functions``:
    whether loops of its graph have functions of the user's own.
    """

    def __init__(
        self, executable: Executable, cheaper: Callable[[str, str], None] | None = None, own_functions: bool = False
    ) -> None:
        super().__init__()
        self.executable = executable
        self.cheaper = cheaper
        self.shown: Mapping[int, bool] = {}  # as ``shown_results`` has them
        self.unbound: frozenset[int] = frozenset()  # results that are taken one by one
        recurrence = executable.recurrence
        self.tells_rows = own_functions or tells_rows(recurrence)
        self.unused = Unused(own_functions, any(isinstance(x, Items) for x in recurrence.xs), self.tells_rows)

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run it. Raises UnsupportedError under ``torch.func`` transforms, and where processes do not play together."""
        where = self.executable.recurrence.where
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnsupportedError(
                f"torch.func transforms (grad, vmap, jacrev, ...) cannot go through the compiled recurrence at "
                f"{where}. Apply them to the plain model, outside of torch.compile."
            )
        if self.executable.together:
            self.executable.together.agree(self.executable.recurrence.examples[0].device)
        training = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        parts = Parts(_reverse) if training and self.classes else None
        given = parts.split(self.classes, operands) if parts else operands
        anchor = torch.empty(0, requires_grad=parts is not None)  # the node is one even where no operand has a history
        result: tuple[Tensor, ...] = _Reversible.apply(self, training, parts, anchor, *given)  # type: ignore[no-untyped-call]
        return self._joined(result, parts) if parts or (training and self.shown) else result

    @functools.cached_property
    def classes(self) -> Classes:
        """Its operands that not all results reach."""
        return classes_of(self.executable)

    @functools.cached_property
    def links(self) -> Links:
        """What its last step makes of which last carries."""
        return Links.of(self.executable.recurrence, self._needing(), self.shown)

    def _needing(self) -> list[bool]:
        return needing(self.executable.recurrence, differentiable_inputs(self.executable))

    def _joined(self, results: tuple[Tensor, ...], parts: Parts | None) -> tuple[Tensor, ...]:
        """The results, behind the last carries that the caller is given, and operands that not all results reach."""
        links = self.links if self.shown else Links({}, {}, frozenset())
        if not links.through and parts is None:
            return results
        twice = self.unbound.intersection(self.shown)
        return joined(self.executable, self._needing(), links, results, twice, parts)

    def played(self, start: Start, training: bool) -> tuple[Run, tuple[list[Tensor], list[Tensor]]]:
        """The forward half of a call, and what it gives. Where memory runs out it starts anew with a cheaper plan."""
        refusal: ShortageError | None = None
        while True:
            executable = self.executable
            run = Run(executable, start)
            try:
                return run, run.forward(training)
            except (RuntimeError, MemoryError) as error:
                if not training or not is_shortage(error):
                    raise
                shortage = str(error)
            del run
            start.rewind()
            refusal = self._shorten(executable, "forward", shortage, refusal)

    def reversed(
        self, start: Start, held: list[Run], grads: Sequence[Tensor | None], keep: bool
    ) -> tuple[Run, list[Tensor | None]]:
        """The backward half of the run that is ``held``, which is taken out, and what it gives.

        Where memory runs out all that the run holds is freed, and the call is played again from its start with a
        cheaper plan, as it is where no run is held; gradients are handed on only once all are there.
        """
        refusal: ShortageError | None = None
        while True:
            run = held.pop() if held else None
            executable = run.executable if run else self.executable
            try:
                run = run or again(executable, start)
                found = run.backward(grads, keep)
                executable.compiled.latest.note(executable)
                return run, found
            except (RuntimeError, MemoryError) as error:
                if not is_shortage(error):
                    raise
                shortage = str(error)
            run = None
            refusal = self._shorten(executable, "backward", shortage, refusal)

    def _shorten(
        self, failed: Executable, half: str, shortage: str, refusal: ShortageError | None
    ) -> ShortageError | None:
        """Take a cheaper plan than the one with which memory ran out, unless there is another one since.

        If there is none, gives the refusal, to be raised when memory runs out once more: now Python's collector has
        freed what only it frees, such as an earlier call in the frames of an exception.
        """
        if failed.together:
            raise ShortageError(
                f"Memory ran out in the {half} of the loop at {failed.recurrence.where} ({shortage.splitlines()[0]}). "
                "Its steps speak with other processes, so this one cannot play it again. End all, and begin anew with "
                "a smaller batch, or with a memory_budget in bytes, the same for all."
            )
        if failed is not self.executable:
            return refusal
        if refusal is not None:
            raise refusal
        if self.cheaper is None:
            raise torch.OutOfMemoryError(shortage)
        try:
            self.cheaper(half, shortage)
        except ShortageError as error:
            refusal = error.with_traceback(None)
        gc.collect()
        return refusal


class _Reversible(torch.autograd.Function):
    """The forward plays the first half of the program, the backward the second."""

    @staticmethod
    def forward(
        ctx: Any, rolled: RecurrenceModule, training: bool, parts: Parts | None, _: Tensor, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        executable = rolled.executable
        carried = len(executable.recurrence.carries)
        plain = [operand.detach() for operand in operands]
        plain[:carried] = [carry.contiguous() for carry in plain[:carried]]
        loose = executable.recurrence.loose
        examples = enumerate(executable.recurrence.examples)
        laid_out = [plain[i] if i in loose else conform(plain[i], like) for i, like in examples]
        start = Start.of(executable, laid_out)
        with as_traced(plain):
            run, (last, ys) = rolled.played(start, training)
        ctx.set_materialize_grads(False)
        ctx.rolled, ctx.start, ctx.run, ctx.shares = rolled, start, run, None
        ctx.used_rows, ctx.asks = {}, rolled.unused.asked  # ``rows`` fills it, and loops that are asked
        ctx.parts, real = parts, parts.real if parts else {}
        ctx.save_for_backward(*(real.get(number, each) for number, each in enumerate(operands)))
        ctx.apart = frozenset(real)
        real.clear()
        results = (*last, *ys)
        ctx.mark_non_differentiable(
            *(r for i, r in enumerate(results) if i not in next(iter(executable.compiled.segments.values())).tangents)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        start: Start | None = ctx.start
        if torch.is_grad_enabled():
            where = ctx.rolled.executable.recurrence.where
            raise UnsupportedError(
                f"Double backward (create_graph=True) through the compiled recurrence at {where} is not supported. "
                "Use the plain model for it, outside of torch.compile."
            )
        saved = ctx.saved_tensors if ctx.shares is None else ctx.shares.operands(ctx)
        operands = tuple(saved)  # raises if one was changed in place since the forward
        if start is None:
            raise UnsupportedError(
                "This recurrence was reversed already, and its tape is gone. Call backward(retain_graph=True) the "
                "first time."
            )
        if ctx.shares is not None:
            grads = tuple(ctx.shares.take_off(grads))
        used = used_of(ctx.used_rows, grads)
        ctx.used_rows.clear()
        dead, telling = ctx.rolled.unused.check(ctx.rolled.executable, operands, start.operands, grads, used)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        held, ctx.run = [ctx.run] if ctx.run else [], None
        with as_traced(operands), without_hooks_of_all_modules():
            run, results = ctx.rolled.reversed(start, held, grads, keep)
        ctx.run, ctx.start = (run, start) if keep else (None, None)
        for i, tell in telling:
            tell(results[i])
        if ctx.parts is not None:
            ctx.parts.leave({i: grad for i, grad in enumerate(results) if i in ctx.apart and i not in dead})
        needs = ctx.needs_input_grad[_BEFORE:]
        given = enumerate(zip(results, needs, strict=True))
        gradients = [grad if need and i not in dead else None for i, (grad, need) in given]
        handed = zip(operands, gradients, needs, strict=True)
        spare_hooks(operand for operand, grad, need in handed if need and grad is None)
        return (*[None] * _BEFORE, *gradients)

    @staticmethod
    def jvp(ctx: Any, *_: Tensor | None) -> Any:
        raise UnsupportedError(
            f"Forward-mode gradients (torch.autograd.forward_ad) through the compiled recurrence at "
            f"{ctx.rolled.executable.recurrence.where} are not supported. Use the plain model for them."
        )


def _reverse(node: Any, grads: Mapping[int, Tensor]) -> None:
    """Reverse a loop to whose node autograd does not go, for some gradients of results."""
    results = next(iter(node.rolled.executable.compiled.segments.values())).outputs
    _Reversible.backward(node, *map(grads.get, range(results)))


def conform(value: Tensor, like: Tensor) -> Tensor:
    """The value in the layout that the segments were compiled for; itself where it has that layout."""
    if value.stride() == like.stride():
        return value
    return torch.empty_strided(value.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)
