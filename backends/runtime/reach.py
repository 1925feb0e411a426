"""Operands that not every result of a loop reaches: autograd goes to them by the results that do, as in eager.

A node of autograd hands on to all that it was given, with nothing where nothing came in. What lies before an operand
then runs all the same: a function of the user's own on zeros, which may add something to them, and a hook on None. So
an operand that some results do not reach is no operand of the loop's node. It is one of a node of its own (``_Part``)
behind those results alone, which it sees by a ticket, a tensor without a value. That node gives what the loop's has
left for it. Of the two, autograd runs the one that was made last first: the loop's.

Which of the parameters that each step has for itself a loss reaches is known only in the backward. Hooks on those that
it does not reach are then kept from being called with None (``spare_hooks``).

Private torch API, tried on 2.11 and 2.13: ``_will_engine_execute_node`` (whether this backward goes to a node) and
``_current_graph_task_id`` (which backward this is).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reroll.backends.runtime.executable import Executable
from reroll.errors import UnsupportedError

Classes = Mapping[frozenset[int], Sequence[int]]
"""Operands by the results that reach them, both by number."""


def classes_of(executable: Executable) -> Classes:
    """The operands of a loop that some of its results do not reach."""
    results = frozenset(next(iter(executable.compiled.segments.values())).tangents)
    alive = {result: executable.live_operands(frozenset({result})) for result in results}
    found = dict[frozenset[int], list[int]]()
    for operand in range(executable.recurrence.operands):
        found.setdefault(frozenset(n for n, reached in alive.items() if operand in reached), []).append(operand)
    return {reaching: operands for reaching, operands in found.items() if reaching != results}


@dataclass(slots=True, eq=False)
class Parts:
    """What such operands of one call get.

    real: these operands, by number, until the loop's node has saved them. tickets: for each result those of the
    operands that it reaches. found: their gradients, of the backward that ran last. noted: the loop's node and the
    gradients of its results, of a backward that does not go to that node; ``play`` reverses the loop then.
    """

    play: Callable[..., object]
    real: dict[int, Tensor] = field(default_factory=dict)
    tickets: dict[int, list[Tensor]] = field(default_factory=dict)
    found: tuple[int, dict[int, Tensor | None]] = (-1, {})
    noted: tuple[int, Any, dict[int, Tensor]] = (-1, None, {})

    def split(self, classes: Classes, operands: Sequence[Tensor]) -> list[Tensor]:
        """The operands for the loop's node: those of the classes without a history."""
        given = [*operands]
        for results, numbers in classes.items():
            needing = tuple(number for number in numbers if operands[number].requires_grad)
            if not needing:
                continue
            self.real |= {number: operands[number] for number in needing}
            for number in needing:
                given[number] = operands[number].detach()
            if results:
                ticket: Tensor = _Part.apply(self, needing, *map(self.real.get, needing))  # type: ignore[no-untyped-call]
                for result in results:
                    self.tickets.setdefault(result, []).append(ticket)
        return given

    def come_in(self, node: Any, result: int, grad: Tensor | None) -> None:
        """A gradient of a result goes to the loop's node, unless this backward leaves that out."""
        if grad is None or goes_to(node):
            return
        task, _, grads = self.noted
        if task != backward_running():
            self.noted = task, _, grads = backward_running(), node, {}
        grads[result] = grads[result] + grad if result in grads else grad

    def leave(self, gradients: Mapping[int, Tensor | None]) -> None:
        """The loop's node has run."""
        self.found, self.noted = (backward_running(), dict(gradients)), (-1, None, {})

    def take(self, numbers: Sequence[int]) -> list[Tensor | None]:
        """The gradients of some of these operands, in the backward that runs."""
        if self.found[0] != backward_running():
            task, node, grads = self.noted
            if task != backward_running():
                raise UnsupportedError(
                    "A backward went to the inputs of a compiled loop before it went to the loop, as it runs on "
                    "several devices at once. Keep what the loss is made of on one device, or use the plain model."
                )
            self.play(node, grads)
        return [self.found[1].pop(number, None) for number in numbers]


class _Part(torch.autograd.Function):
    """Operands that the same results reach. It gives the ticket by which these are seen to have a gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, numbers: Sequence[int], *operands: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parts, ctx.numbers = parts, numbers
        return operands[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.parts.take(ctx.numbers))


def spare_hooks(operands: Iterable[Tensor]) -> None:
    """Have no hook be called with None on leaves of which operands without a gradient are made; eager calls none."""
    seen, todo = set[Any](), list[Any]()
    for operand in operands:
        _spare(operand) if operand.is_leaf else todo.append(operand.grad_fn)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        _spare(getattr(node, "variable", None))
        todo += [source for source, _ in node.next_functions]


def _spare(leaf: Tensor | None) -> None:
    hooks: dict[int, Any] = getattr(leaf, "_backward_hooks", None) or {}
    for key, hook in hooks.items():
        if not hasattr(hook, "spared"):
            hooks[key] = _Spared(hook)


@dataclass(frozen=True, slots=True)
class _Spared:
    """A hook that is not called without a gradient."""

    spared: Callable[[Tensor], Tensor | None]

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self.spared(grad)


def backward_running() -> int:
    """Which backward runs."""
    return torch._C._current_graph_task_id()


def goes_to(node: Any) -> bool:
    """Whether the backward that runs goes to a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad names
        return True
