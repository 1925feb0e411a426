"""What a loss does not use of a loop's outputs: eager leaves out the operations that only those need, at each step.

A program runs the backward of every step, with zeros for what is not used. That is the same where gradients are linear
in what comes in, as those of torch's own operations are. A function of the user's own may add something to them (an
auxiliary loss): then a call whose loss does not reach it at every step is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from reroll.backends.executable import Executable
from reroll.backends.randomness import random_numbers_kept
from reroll.backends.shortages import is_shortage
from reroll.backends.tracing import first_step, mode_of
from reroll.capture_torch import is_higher_order
from reroll.errors import RerollWarning, UnsupportedError
from reroll.recurrence import Recurrence

_TORCH = ("torch", "_operator", "builtins", "math")

Rows = dict[int, list[bool]]
"""By the number of a stacked output whether the loss uses it, step for step."""


def rows(stacked: Tensor) -> tuple[Tensor, ...]:
    """The outputs of all steps of a loop, one by one. Its node of autograd is told which of them a loss uses."""
    found = stacked.unbind(0)
    used: Rows | None = getattr(stacked.grad_fn, "used_rows", None)
    if used is not None and found and found[0].grad_fn is not None:
        number = stacked.output_nr

        def note(grads: Sequence[Tensor | None]) -> None:
            used[number] = [grad is not None for grad in grads]

        found[0].grad_fn.register_prehook(note)
    return found


def one_by_one(outer: fx.Graph, loops: Mapping[str, object]) -> None:
    """Let the outputs of loops, by the names of their modules, be taken one by one by ``rows``."""
    for node in outer.find_nodes(op="call_function", target=torch.unbind):
        source: Any = node.args[0]
        if source.op == "call_function" and source.args and getattr(source.args[0], "target", None) in loops:
            node.target, node.args, node.kwargs = rows, (source,), {}


@dataclass(slots=True)
class Unused:
    """What is known of a loop. ``own``: its steps have functions of the user's, and can be run by one process alone.
    ``known``: for the outputs of a step that matter, whether a gradient would differ if others got zeros, and through
    which carries the step before matters."""

    own: bool
    known: dict[frozenset[int], tuple[bool, frozenset[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, executable: Executable) -> Unused:
        """Nothing is known yet. Steps that speak with other processes are not looked at."""
        nodes = executable.recurrence.step.graph.nodes
        own = any(_is_own(node.target) for node in nodes if node.op == "call_function")
        return cls(own and executable.together is None)

    def check(
        self, recurrence: Recurrence, operands: Sequence[Tensor], grads: Sequence[Tensor | None], partly: Rows
    ) -> None:
        """Raise UnsupportedError where gradients would not be eager's. ``grads`` came in for the outputs."""
        if not self.own:
            return
        carried = len(recurrence.carries)
        given = [number for number, grad in enumerate(grads) if grad is not None]
        live = frozenset(number for number in given if number < carried)
        whole = frozenset(number for number in given if number >= carried and number not in partly)
        for step in reversed(range(recurrence.steps)):
            live = live | whole | {number for number, used in partly.items() if used[step]}
            found = self.known.get(live) or _looked_at(recurrence, operands, live)
            if found is None:
                return  # for want of memory: the next call looks
            self.known[live] = differs, before = found
            if differs:
                raise UnsupportedError(_refusal(recurrence))
            if not partly and before | whole == live:
                return
            live = before


def _is_own(target: Any) -> bool:
    """Whether gradients of an operation may be another's than torch's."""
    if is_higher_order(target):
        return True
    if type(target).__module__ == "torch._ops":
        return not str(target).startswith(("aten.", "prims."))
    return not str(getattr(target, "__module__", None) or "torch").startswith(_TORCH)


def _looked_at(
    recurrence: Recurrence, operands: Sequence[Tensor], live: frozenset[int]
) -> tuple[bool, frozenset[int]] | None:
    """As ``_step``; None if memory runs out. A step that torch cannot run by itself is taken for linear, and said."""
    try:
        return _step(recurrence, operands, live)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        if is_shortage(error):
            return None
        text = (
            f"A step of the loop at {recurrence.where} cannot be run by itself ({str(error).splitlines()[0]}), so it "
            "is not known whether functions of your own in it give gradients where none come in (an auxiliary loss, "
            "say). If they do, let the loss use all outputs of the loop."
        )
        warnings.warn(text, RerollWarning, stacklevel=2)
        return False, live


def _step(recurrence: Recurrence, operands: Sequence[Tensor], live: frozenset[int]) -> tuple[bool, frozenset[int]]:
    """Whether gradients of a step differ if the outputs that are not ``live`` get zeros, rather than none; and the
    carries that autograd reaches from the others. Seen at the first step of a call, run by torch."""
    with torch.enable_grad(), random_numbers_kept(), mode_of(recurrence):
        inputs = [_leaf(value) for value in first_step(recurrence, operands)]
        outputs = recurrence.step(*inputs)
    ends = {number: value for number, value in enumerate(outputs) if value.requires_grad}
    leaves = [value for value in inputs if value.requires_grad]
    alone = _gradients({number: value for number, value in ends.items() if number in live}, leaves, live)
    differs = any(map(_differ, alone, _gradients(ends, leaves, live)))
    reached = {id(leaf) for leaf, grad in zip(leaves, alone, strict=True) if grad is not None}
    carried = inputs[: len(recurrence.carries)]
    return differs, frozenset(number for number, value in enumerate(carried) if id(value) in reached)


def _leaf(value: Any) -> Any:
    value = value.detach()
    return value.requires_grad_() if value.is_floating_point() or value.is_complex() else value


def _gradients(ends: Mapping[int, Tensor], leaves: Sequence[Tensor], live: frozenset[int]) -> list[Tensor | None]:
    """Gradients with ones for what is live, zeros for what else ends hold."""
    if not ends or not leaves:
        return [None] * len(leaves)
    tangents = [torch.full_like(value, float(number in live)) for number, value in ends.items()]
    return list(torch.autograd.grad(list(ends.values()), leaves, tangents, retain_graph=True, allow_unused=True))


def _differ(alone: Tensor | None, padded: Tensor | None) -> bool:
    """Whether two gradients are not the same, but for rounding, and where 0 * inf shows for itself."""
    if padded is None:
        return False
    alone = torch.zeros_like(padded) if alone is None else alone
    difference, size = (float(value.abs().nan_to_num().sum()) for value in (padded - alone, alone))
    return difference > 100 * torch.finfo(padded.dtype).eps * size


def _refusal(recurrence: Recurrence) -> str:
    return (
        f"The loss does not use all that the loop at {recurrence.where} gives at every step, and a function of your "
        "own in it gives a gradient where none comes in (an auxiliary loss, say). Plain autograd leaves it out at "
        "steps that the loss does not use; here all steps are reversed, so gradients would differ. Let the loss use "
        "all outputs (adding 0 * output.sum() of each is enough), or use the plain model."
    )
