"""A recurrence: one step, what it carries, what it reads at every step, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

_COMPUTER = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Slices:
    """A per-step input: index ``start + stride * t`` of dimension ``dim`` of operand ``operand`` at step t."""

    operand: int
    dim: int
    start: int
    stride: int


@dataclass(frozen=True, slots=True)
class Items:
    """A per-step input: operand ``operands[t]`` at step t."""

    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A per-step input: the number ``values[t]`` at step t, as a 0-dimensional tensor.

    dtype: int64 for whole numbers, else float64, as Python's numbers.
    """

    values: tuple[float, ...]
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        whole = all(isinstance(value, int) for value in self.values)
        object.__setattr__(self, "dtype", torch.int64 if whole else torch.float64)


PerStep = Slices | Items | Numbers


def without(recurrence: Recurrence, head: int, tail: int) -> Recurrence:
    """A recurrence that knows of more steps at its head and tail which run by themselves."""
    peeled = tuple(each and each.more(head, tail) for each in recurrence.peeled)
    return replace(recurrence, peeled=peeled, left=recurrence.left + head + tail)


def between(x: PerStep, start: int, stop: int) -> PerStep:
    """What the steps [start, stop) read, counted from the first of them."""
    if isinstance(x, Slices):
        return replace(x, start=x.start + x.stride * start)
    return Items(x.operands[start:stop]) if isinstance(x, Items) else Numbers(x.values[start:stop])


@dataclass(frozen=True, slots=True)
class RowSteps:
    """Of which steps a stacked output has rows: of every ``every``-th one from step ``first`` on; of all by default."""

    first: int = 0
    every: int = 1

    @property
    def whole(self) -> bool:
        """Whether there is a row of every step."""
        return self == RowSteps()

    def rows(self, steps: int) -> int:
        """How many rows there are of so many first steps."""
        return len(range(self.first, steps, self.every))

    def among(self, start: int, steps: int) -> tuple[slice, slice]:
        """The rows of steps [start, start + steps): where they are in the output, and which of those steps they are."""
        begin, end = self.rows(start), self.rows(start + steps)
        return slice(begin, end), slice(self.first + self.every * begin - start, steps, self.every)


@dataclass(frozen=True, slots=True)
class Slots:
    """The places of the inputs of a segment of ``steps`` steps: carries, then what its steps read, then constants.

    ``xs``: the places of each per-step input, and the input: one place, but of ``Items`` one for each step.
    ``operands``: for each place those that are read there, at whichever steps the segment runs; none for numbers.
    """

    steps: int
    carries: range
    xs: tuple[tuple[range, PerStep], ...]
    constants: range
    operands: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Peeled:
    """How many steps of the user's loop run by themselves, ``before`` and ``behind`` those of a recurrence.

    ``mark``: what the nodes of those behind have in their meta under "loop"; empty where some have nothing.
    """

    before: int = 0
    behind: int = 0
    mark: str = ""

    def more(self, before: int, behind: int) -> Peeled:
        """The same, with more steps taken off the recurrence."""
        return Peeled(self.before + before, self.behind + behind, "" if behind else self.mark)


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """``steps`` runs of ``step``: ``(carry..., xs..., constants...) -> (carry'..., ys...)``.

    It is called on operands ``(initial carry..., operands of xs..., constants...)`` and gives ``(last carry...,
    ys...)``, each of ``ys`` stacked along a new first dimension of ``steps``. ``constants`` are operand numbers.
    ``kept``: for each of ``ys`` the steps whose rows it has, those of all steps where nothing is said.
    ``autocast`` holds the arguments of the autocast regions around the loop, ``grad_enabled`` whether it runs with
    gradients, ``random`` whether a step draws random numbers, ``where`` the line of the user's code.
    ``blocks``: its steps are blocks over depth, which read weights of their own; ``modules`` names for each of them the
    module that holds these, if there is one. ``any_length``: its compiled segments
    serve other numbers of steps too, so slices of time come in a layout that does not depend on it; they are of
    ``segment`` steps, if that is not 0. ``peeled``: for
    each carry the steps of its loop that are not among these; None, or missing, where that is not known. ``left``: of
    how many iterations of the user's loop parts run by themselves around these steps, as far as is known, ``within``
    whether a step begins in the middle of one.
    ``dropped``: whether steps behind these were left out whose outputs eager gives zeros for gradients.
    ``numbers_on``: where numbers lie that differ from step to step.
    """

    name: str
    step: fx.GraphModule
    steps: int
    carries: tuple[str, ...]
    xs: tuple[PerStep, ...]
    constants: tuple[int, ...]
    ys: tuple[str, ...]
    examples: tuple[torch.Tensor, ...]
    autocast: tuple[tuple[object, ...], ...] = ()
    grad_enabled: bool = True
    random: bool = False
    blocks: bool = False
    modules: tuple[str, ...] = ()
    where: str = ""
    any_length: bool = False
    segment: int = 0
    peeled: tuple[Peeled | None, ...] = ()
    left: int = 0
    within: bool = False
    kept: tuple[RowSteps, ...] = ()
    numbers_on: torch.device = _COMPUTER
    dropped: bool = False

    @property
    def operands(self) -> int:
        """Number of operands."""
        return len(self.examples)

    @property
    def kept_rows(self) -> tuple[RowSteps, ...]:
        """For each of ``ys`` the steps whose rows it has."""
        return self.kept + (RowSteps(),) * (len(self.ys) - len(self.kept))

    def rows_of(self, number: int) -> RowSteps:
        """The steps whose rows a result has, by its number; of a last carry, whose rows are something else, all."""
        at = number - len(self.carries)
        return self.kept_rows[at] if at >= 0 else RowSteps()

    @property
    def loose(self) -> frozenset[int]:
        """Operands whose layout may differ from their examples': sequences, if the segments serve any length."""
        return frozenset(x.operand for x in self.xs if isinstance(x, Slices)) if self.any_length else frozenset()

    def loose_rows(self, steps: int) -> tuple[tuple[int, Slices], ...]:
        """(place, what it is) of each input of a segment that is rows of these, which it takes without gaps."""
        read = self.slots(steps).xs if self.any_length else ()
        return tuple((places[0], x) for places, x in read if isinstance(x, Slices))

    @property
    def inputs(self) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """The placeholders of the step: of its carries, of what it reads at each step, of its constants."""
        nodes, slots = self.step.graph.find_nodes(op="placeholder"), self.slots(1)
        xs, constants = slots.carries.stop, slots.constants.start
        return nodes[:xs], nodes[xs:constants], nodes[constants:]

    def slots(self, steps: int) -> Slots:
        """The places of the inputs of a segment of some steps; of the step itself, for one."""
        carries, xs = range(len(self.carries)), list[tuple[range, PerStep]]()
        operands: list[tuple[int, ...]] = [(i,) for i in carries]
        for x in self.xs:
            read = x.operands if isinstance(x, Items) else (x.operand,) if isinstance(x, Slices) else ()
            places = range(len(operands), len(operands) + (steps if isinstance(x, Items) else 1))
            xs.append((places, x))
            operands += [read] * len(places)
        constants = range(len(operands), len(operands) + len(self.constants))
        return Slots(steps, carries, tuple(xs), constants, (*operands, *((i,) for i in self.constants)))

    def read_first(self, operands: Sequence[torch.Tensor], row: int | None = None) -> list[torch.Tensor]:
        """What the first step reads besides its carries: what it reads at each step, then constants.

        row: the index of slices, where the operands are examples too short for that of the first step.
        """
        xs = list[torch.Tensor]()
        for x in self.xs:
            if isinstance(x, Numbers):
                xs.append(torch.tensor(x.values[0], dtype=x.dtype, device=self.numbers_on))
            elif isinstance(x, Items):
                xs.append(operands[x.operands[0]])
            else:
                xs.append(operands[x.operand].select(x.dim, x.start if row is None else row))
        return [*xs, *(operands[i] for i in self.constants)]

    def modes(self) -> ExitStack:
        """Enters the gradient and autocast modes around the loop, as they were in the user's code."""
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
        for device, dtype, enabled, cache in self.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))  # type: ignore[arg-type]
        return stack

    @property
    def unit(self) -> str:
        """What a step is called: a block over depth, or a step over time."""
        return "block" if self.blocks else "step"

    @property
    def short(self) -> bool:
        """Whether values of a step are in half precision, so that all that it gives is rounded to that."""
        values = (node.meta.get("example_value") for node in self.step.graph.nodes)
        return any(isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16) for x in values)

    @property
    def row_bytes(self) -> int:
        """Bytes of the stacked outputs, as far as the step's graph has examples of them."""
        results: Any = self.step.graph.output_node().args[0]
        values = [getattr(node, "meta", {}).get("example_value") for node in results[len(self.carries) :]]
        kept = zip(values, self.kept_rows, strict=True)
        return sum(like.nbytes * rows.rows(self.steps) for like, rows in kept if isinstance(like, torch.Tensor))

    @property
    def size(self) -> str:
        """How many steps there are, and how large one is."""
        calls = sum(node.op.startswith("call") for node in self.step.graph.nodes)
        told = ((self.steps, self.unit), (calls, "operation"), (len(self.carries), "carried value"))
        return "{} of {}, {}".format(*(f"{number:,} {what}{'s' * (number != 1)}" for number, what in told))

    def describe(self) -> str:
        """One line: the step, its length, and where it comes from."""
        return f"{self.name}: {self.size}, at {self.where}"


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The recurrences of a graph, and ``outer``: the graph around them, which calls each as a module of its name.

    ``reason`` says what was looked for and where the repetition broke, if there is no recurrence.
    ``notes`` say which recurrences were not fused, and why. ``captured``: as they were before passes, where some ran.
    """

    outer: fx.Graph
    recurrences: tuple[Recurrence, ...]
    reason: str = ""
    notes: tuple[str, ...] = ()
    captured: Capture | None = None

    def __str__(self) -> str:
        """The graph, then each recurrence with the graph of its step."""
        loops = (f"{each.describe()}\n{each.step.graph}" for each in self.recurrences)
        return "\n\n".join((str(self.outer), *loops))
