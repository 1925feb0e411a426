"""What a loss does not use of a loop's outputs: eager leaves out the operations that only those need, at each step.

A program runs the backward of every step, with zeros for what is not used. That is the same where gradients are linear
in what comes in. Functions of the user's own may add something to them (an auxiliary loss): then a call whose loss does
not reach them at every step is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from reroll.backends.runtime.executable import Executable
from reroll.backends.runtime.own_functions import Look, look, own_functions
from reroll.errors import RerollWarning, UnsupportedError
from reroll.recurrence import Items, Recurrence, Slices
from reroll.shortages import is_shortage

Rows = dict[int, list[bool]]
"""By the number of a stacked output whether the loss uses it, step for step, where that is known."""


def rows(stacked: Tensor) -> tuple[Tensor, ...]:
    """The outputs of all steps of a loop, one by one. Its node of autograd is told which of them a loss uses."""
    found = stacked.unbind(0)
    used: Rows | None = getattr(stacked.grad_fn, "used_rows", None)
    if used is not None and found and found[0].grad_fn is not None:
        number = stacked.output_nr
        found[0].grad_fn.register_prehook(lambda grads: _note(used, number, [grad is not None for grad in grads]))
    return found


def _note(used: Rows, number: int, also: Sequence[bool]) -> None:
    used[number] = [a or b for a, b in zip(used.get(number, [False] * len(also)), also, strict=True)]


def one_by_one(outer: fx.Graph, loops: Mapping[str, object]) -> None:
    """Let the outputs of loops, by the names of their modules, be taken one by one by ``rows``."""
    for node in outer.find_nodes(op="call_function", target=torch.unbind):
        if len(node.args) != 2 or node.args[1] != 0 or node.kwargs:
            continue
        source: Any = node.args[0]
        if source.op == "call_function" and source.args and getattr(source.args[0], "target", None) in loops:
            node.target, node.args = rows, (source,)


def have_own_functions(executables: Sequence[Executable]) -> bool:
    """Whether a step of one of these has functions of the user's own."""
    return any(own_functions(each.recurrence.step) for each in executables)


@dataclass(slots=True)
class Unused:
    """What is known of a loop, by the outputs of a step that matter. ``asked``: whether it matters at all."""

    asked: bool
    known: dict[frozenset[int], Look] = field(default_factory=dict)

    def check(
        self,
        executable: Executable,
        given: Sequence[Tensor],
        plain: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        partly: Rows,
    ) -> frozenset[int]:
        """Raise UnsupportedError where gradients would not be eager's; tell loops whose outputs this one reads.

        ``given`` operands, ``plain`` as they are computed with; ``grads`` came in for the outputs, of which ``partly``
        are used at some steps alone. Gives the operands that are read at unused steps alone. Steps that speak with
        other processes are not looked at.
        """
        if not self.asked or executable.together:
            return frozenset()
        reached = self._reached(executable, plain, grads, partly)
        if reached is None:
            return frozenset()
        recurrence, dead = executable.recurrence, set[int]()
        for at, x in enumerate(recurrence.xs, len(recurrence.carries)):
            if isinstance(x, Slices):
                _tell(given[x.operand], x, at, reached)
            elif isinstance(x, Items):
                dead |= {operand for operand, each in zip(x.operands, reached, strict=True) if at not in each}
                dead -= {operand for operand, each in zip(x.operands, reached, strict=True) if at in each}
        return frozenset(dead)

    def _reached(
        self, executable: Executable, plain: Sequence[Tensor], grads: Sequence[Tensor | None], partly: Rows
    ) -> list[frozenset[int]] | None:
        """The inputs that autograd reaches at each step; None if memory does not suffice to look."""
        recurrence, carried = executable.recurrence, len(executable.recurrence.carries)
        came = [number for number, grad in enumerate(grads) if grad is not None]
        whole = frozenset(number for number in came if number >= carried and number not in partly)
        live = frozenset(number for number in came if number < carried)
        found = list[frozenset[int]]()
        for step in reversed(range(recurrence.steps)):
            live = live | whole | {number for number, used in partly.items() if used[step]}
            seen = self.known.get(live) or _look(executable, plain, live)
            if seen is None:
                return None
            self.known[live] = seen
            if seen.differ:
                raise UnsupportedError(_refusal(recurrence))
            found.append(seen.reached)
            before = frozenset(number for number in seen.reached if number < carried)
            if not partly and before | whole == live:  # so it stays
                found += [seen.reached] * step
                break
            live = before
        return found[::-1]


def _tell(operand: Tensor, x: Slices, number: int, reached: Sequence[frozenset[int]]) -> None:
    """Tell the loop that made an operand, input ``number`` of a step, which of its rows are used here."""
    used: Rows | None = getattr(operand.grad_fn, "used_rows", None)
    if used is None or x.dim != 0:
        return
    also = [False] * operand.shape[0]
    for step, inputs in enumerate(reached):
        also[x.start + x.stride * step] = number in inputs
    _note(used, operand.output_nr, also)


def _look(executable: Executable, plain: Sequence[Tensor], live: frozenset[int]) -> Look | None:
    """As ``look``; None if memory runs out. A step that torch cannot run by itself is taken for linear, and said."""
    recurrence = executable.recurrence
    inputs = next(iter(executable.segments.values())).inputs
    try:
        return look(recurrence, inputs, plain, live)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        if is_shortage(error):
            return None
        text = (
            f"A step of the loop at {recurrence.where} cannot be run by itself ({str(error).splitlines()[0]}), so it "
            "is not known whether functions of your own in it give gradients where none come in (an auxiliary loss, "
            "say). If they do, let the loss use all outputs of the loop."
        )
        warnings.warn(text, RerollWarning, stacklevel=2)
        return Look(False, frozenset(range(len(recurrence.carries) + len(recurrence.xs))))


def _refusal(recurrence: Recurrence) -> str:
    return (
        f"The loss does not use all that the loop at {recurrence.where} gives at every step, and a function of your "
        "own in it gives a gradient where none comes in (an auxiliary loss, say). Plain autograd leaves it out at "
        "steps that the loss does not use; here all steps are reversed, so gradients would differ. Let the loss use "
        "all outputs (adding 0 * output.sum() of each is enough), or use the plain model."
    )
