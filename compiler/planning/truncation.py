"""Truncated BPTT: between which steps of a loop no gradient of a state passes (``truncate=k``).

The gradients are those of a ``detach`` of all states before iterations k, 2 k, ... of the user's loop (Williams and
Peng 1990, doi:10.1162/neco.1990.2.4.490, with h = h' = k). They are not the gradients of the loss. What is added up
over time and read by nobody on the way, such as a loss, is no state: its gradient passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from reroll.errors import UnsupportedError
from reroll.graph.effects import operation
from reroll.recurrence import Peeled, Recurrence


@dataclass(frozen=True, slots=True)
class Cuts:
    """Gradients are cut before every ``every``-th iteration. ``first``: which iteration of its loop a carry's first
    step is, None of a carry that is not cut. ``steps``: those of the recurrence."""

    every: int
    first: tuple[int | None, ...]
    steps: int

    def at(self, step: int) -> frozenset[int]:
        """The carries of which no gradient passes from a step to the one before it."""
        begun = enumerate(self.first)
        return frozenset(
            carry for carry, first in begun if first is not None and first + step and not (first + step) % self.every
        )

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """A range of steps in pieces, cut where some carry is."""
        ends = self.between(start, stop)
        yield from zip((start, *ends), (*ends, stop), strict=True)

    def between(self, start: int, stop: int) -> list[int]:
        """The steps strictly between two at which some carry is cut."""
        begun = {first for first in self.first if first is not None}
        found = (range(start + 1 + -(first + start + 1) % self.every, stop, self.every) for first in begun)
        return sorted({step for steps in found for step in steps if self.at(step)})

    def describe(self) -> str:
        """What is cut, in one line."""
        count = len(self.between(-1, self.steps + 1))
        return (
            f"no gradient of a state passes back beyond {self.every:,} steps (cut in {count:,} places), so gradients "
            "are not those of the loss"
        )


def cuts_of(recurrence: Recurrence, every: int | None) -> Cuts | None:
    """Where the gradients of a recurrence are cut; None if nowhere.

    Raises UnsupportedError where its iterations are not known, or a cut falls between steps that are around it.
    """
    if every is None or recurrence.blocks:
        return None
    sums = _sums(recurrence)
    known = dict(enumerate(recurrence.peeled))
    first = tuple(
        None if carry in sums else _checked(recurrence, known.get(carry), every)
        for carry in range(len(recurrence.carries))
    )
    cuts = Cuts(every, first, recurrence.steps)
    return cuts if cuts.between(-1, recurrence.steps + 1) else None


def _checked(recurrence: Recurrence, peeled: Peeled | None, every: int) -> int:
    """The iteration with which a recurrence begins."""
    if peeled is None:
        raise UnsupportedError(
            f"truncate={every}: where the iterations of the loop at {recurrence.where} begin cannot be told from its "
            "lines. Write its body as several statements without a condition in the first, begin with a tensor rather "
            "than a number or None, read one entry of the sequence in each iteration from the first on, reset no "
            "state, and keep the code in a file or a notebook. Or leave truncate out."
        )
    end = peeled.before + recurrence.steps
    apart = (*range(1, peeled.before), *(range(end + bool(peeled.mark), end + peeled.behind)))
    if (cut := next((step for step in apart if step % every == 0), None)) is not None:
        raise UnsupportedError(
            f"truncate={every} cuts the loop at {recurrence.where} before iteration {cut}, which differs from the "
            f"others and runs by itself (iterations {peeled.before} to {end - 1} are alike). Begin with a tensor "
            f"rather than a number or None, read the last states too, or choose another number than {every}."
        )
    return peeled.before


def truncate_gradients(graph: fx.Graph, recurrences: Sequence[Recurrence], every: int | None) -> None:
    """Where gradients are cut between a recurrence and the next step of its loop, which is part of the graph around it,
    let that read the last carries without their gradients.

    Raises UnsupportedError as ``cuts_of`` does, and where that step is reached in other ways.
    """
    for recurrence in recurrences:
        cuts = cuts_of(recurrence, every)
        call = next(node for node in graph.nodes if node.target == recurrence.name)
        for pick in [user for user in call.users if cuts and user.args[1] in cuts.at(recurrence.steps)]:
            _detach(graph, pick, recurrence, recurrence.peeled[int(pick.args[1])])


def _detach(graph: fx.Graph, pick: fx.Node, recurrence: Recurrence, peeled: Peeled | None) -> None:
    order = {node: at for at, node in enumerate(graph.nodes)}
    marked = [node for node in order if peeled and peeled.behind and node.meta.get("loop") == peeled.mark]
    if not marked:
        return
    if any(order[node] < order[marked[-1]] for node in _reached(pick, set(marked))):
        raise UnsupportedError(
            f"The step behind the loop at {recurrence.where}, which differs from the others, reads the last states in "
            "a way in which their gradients cannot be cut. Choose a number for truncate that does not divide the "
            "number of steps less one, or leave it out."
        )
    with graph.inserting_after(pick):
        cut = graph.call_method("detach", (pick,))
    value = pick.meta.get("example_value")
    cut.meta = dict(pick.meta) | ({} if value is None else {"example_value": value.detach()})
    for node in marked:
        node.replace_input_with(pick, cut)


def _reached(pick: fx.Node, ends: set[fx.Node]) -> set[fx.Node]:
    """What follows from a value otherwise than by the nodes in ``ends``."""
    waiting, reached = [pick], set[fx.Node]()
    while waiting:
        new = {user for user in waiting.pop().users if user not in ends and user not in reached}
        reached |= new
        waiting += new
    return reached


def _sums(recurrence: Recurrence) -> frozenset[int]:
    """The carries that are sums: a step adds something to them, and does nothing else with either."""
    carries, _, _ = recurrence.inputs
    results: Any = recurrence.step.graph.output_node().args[0]
    pairs = enumerate(zip(carries, results, strict=False))
    return frozenset(number for number, (carry, following) in pairs if _adds(carry, following))


def _adds(carry: fx.Node, following: object) -> bool:
    if not isinstance(following, fx.Node) or list(carry.users) != [following]:
        return False
    known = operation(following)
    if known.name not in ("add", "sub"):
        return False
    operands = following.args[:2]
    minuend = known.name == "add" or operands[0] is carry
    before, after = (node.meta.get("example_value") for node in (carry, following))
    same = before is not None and after is not None and before.shape == after.shape
    return minuend and operands.count(carry) == 1 and same and all(user.op == "output" for user in following.users)
