"""Operations of a step whose gradients are not torch's own: whether zeros give what no gradient at all gives.

Gradients of torch's operations are linear in what comes in; a function of the user's own may add something to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from reroll.backends.runtime.randomness import random_numbers_kept, random_state, set_random_state
from reroll.graph.nested import tensors_of
from reroll.graph.private import is_higher_order
from reroll.recurrence import Recurrence
from reroll.segment.trace import first_step, mode_of

_TORCH = ("torch", "_operator", "builtins", "math")
_ROUNDING = 1e-6  # of a gradient: both are made by the same operations


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of a step of whose outputs some matter: whether gradients ``differ`` if the others got zeros, and
    the inputs (carries, then what is read at each step) that autograd ``reached``, by number. ``blurred``: zeros gave
    no numbers where none gave some (0 * inf)."""

    differ: bool
    reached: frozenset[int]
    blurred: bool = False


def own_functions(step: fx.GraphModule) -> list[fx.Node]:
    """The operations of a step whose gradients may be another's than torch's."""
    return [node for node in step.graph.nodes if node.op == "call_function" and _is_own(node, step)]


def _is_own(node: fx.Node, step: fx.GraphModule) -> bool:
    target: Any = node.target
    if is_higher_order(target):
        bodies = [getattr(step, str(each.target), None) for each in node.all_input_nodes if each.op == "get_attr"]
        inside = any(own_functions(body) for body in bodies if isinstance(body, fx.GraphModule))
        return inside or target.name() == "autograd_function_apply"
    if type(target).__module__ == "torch._ops":
        return not str(target).startswith(("aten.", "prims."))
    return not str(getattr(target, "__module__", None) or "torch").startswith(_TORCH)


def look(
    recurrence: Recurrence, differentiable: Sequence[int], operands: Sequence[Tensor], live: frozenset[int]
) -> Look:
    """Run a step by torch, on what the first one of a call reads and on normal numbers, and reverse it with and without
    zeros for the outputs that are not ``live``. ``differentiable``: which carries are, by number."""
    changing = len(recurrence.carries) + len(recurrence.xs)
    with torch.enable_grad(), random_numbers_kept(), mode_of(recurrence):
        real = first_step(recurrence, operands)
        made = [torch.randn_like(value) if n < changing and _is_real(value) else value for n, value in enumerate(real)]
        needing = _needing(recurrence, differentiable)
        first, second = (_looked_at(recurrence, values, needing, live) for values in (real, made))
    return Look(first.differ or first.blurred or second.differ, first.reached)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _needing(recurrence: Recurrence, differentiable: Sequence[int]) -> list[bool]:
    """For each input of a step whether a gradient is wanted."""
    examples, carried = recurrence.examples, range(len(recurrence.carries))
    sources = [getattr(x, "operand", None) for x in recurrence.xs]
    items = [bool(getattr(x, "operands", ())) and examples[x.operands[0]].requires_grad for x in recurrence.xs]  # type: ignore[union-attr]
    read = [item if at is None else examples[at].requires_grad for at, item in zip(sources, items, strict=True)]
    return [n in differentiable for n in carried] + read + [examples[n].requires_grad for n in recurrence.constants]


class _Watching(fx.Interpreter):
    """Runs a step; ``given`` are the tensors that functions of the user's own were given."""

    def __init__(self, step: fx.GraphModule) -> None:
        super().__init__(step)
        self.own, self.given = set(own_functions(step)), list[Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        if n in self.own:
            given = tensors_of(self.fetch_args_kwargs_from_env(n))
            self.given += [value for value in given if value.requires_grad]
        return super().run_node(n)


def _looked_at(recurrence: Recurrence, values: Sequence[Any], needing: Sequence[bool], live: frozenset[int]) -> Look:
    """A function that adds something adds it to the gradients of what it is given."""
    inputs = [value.detach().requires_grad_(need) for value, need in zip(values, needing, strict=True)]
    watching = _Watching(recurrence.step)
    outputs = watching.run(*inputs)
    leaves = {n: inputs[n] for n in range(len(inputs) - len(recurrence.constants)) if needing[n]}
    wanted = [*watching.given, *leaves.values()]
    ends = {number: value for number, value in enumerate(outputs) if value.requires_grad}
    some = {number: value for number, value in ends.items() if number in live}
    state = random_state(values)
    alone = _gradients(some, wanted, live)
    set_random_state(state)
    padded = _gradients(ends, wanted, live) if len(some) < len(ends) else alone
    count = len(watching.given)
    reached = (n for n, grad in zip(leaves, alone[count:], strict=True) if grad is not None)
    pairs = list(zip(alone[:count], padded[:count], strict=True))
    blurred = any(_lost(value) and not _lost(other) for other, value in pairs)
    return Look(any(_differ(*pair) for pair in pairs), frozenset(reached), blurred)


def _gradients(ends: Mapping[int, Tensor], wanted: Sequence[Tensor], live: frozenset[int]) -> list[Tensor | None]:
    """Gradients with ones for what is live, zeros for what else ends hold."""
    if not ends or not wanted:
        return [None] * len(wanted)
    tangents = [torch.full_like(value, float(number in live)) for number, value in ends.items()]
    return list(torch.autograd.grad(list(ends.values()), wanted, tangents, retain_graph=True, allow_unused=True))


def _lost(grad: Tensor | None) -> bool:
    return grad is not None and bool(grad.isnan().any())


def _differ(alone: Tensor | None, padded: Tensor | None) -> bool:
    """Whether two gradients are not the same, but for rounding, where they are numbers."""
    if padded is None:
        return False
    alone = torch.zeros_like(padded) if alone is None else alone
    difference, size = (float(value.abs().nan_to_num().sum(dtype=torch.float64)) for value in (padded - alone, alone))
    return difference > _ROUNDING * size
