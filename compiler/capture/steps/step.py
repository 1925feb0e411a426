"""What each value of a region's step is to the step and to the outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from reroll.capture.folded import Gapped, is_row
from reroll.capture.steps.node_hash import Sequence, alike, kept_nbytes
from reroll.capture.steps.operands import (
    MIN_STEPS,
    Carried,
    Constant,
    Index,
    Inner,
    ItemsOf,
    Literal,
    Operand,
    Region,
    classify,
    gaps_in,
    numbered,
)
from reroll.graph.effects import attribute, example, has_effect, in_transform, is_torchs, spelled

_TAIL = 3
_HARDLY = 0.1  # of the bytes of all carries
_NOT_IN_A_STEP = ("copy_", "_assert_async", "set_stream", "_enter_inference_mode", "_exit_inference_mode")


@dataclass(frozen=True, slots=True)
class Register:
    """One value of the step that is carried for ``delay`` steps; ``initial[j]`` is the value of j + 1 steps ago."""

    place: int
    initial: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class SliceOf:
    """Index ``start + stride * r`` of dimension ``dim`` of ``base``, a tensor from outside, at step r."""

    base: fx.Node
    dim: Any
    start: int
    stride: int


@dataclass(slots=True)
class Step:
    """The analysis of one region: what each node of the step is, and what the outside wants of it."""

    sequence: Sequence
    region: Region
    operands: list[list[Operand]]
    invariant: set[int] = field(default_factory=set)
    registers: list[Register] = field(default_factory=list)
    finals: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    ys: list[int] = field(default_factory=list)

    def node(self, place: int, step: int) -> fx.Node:
        """Node ``place`` of step ``step``."""
        return self.sequence.nodes[self.region.start + step * self.region.period + place]

    @property
    def count(self) -> int:
        """How many steps there are, also those that are missing."""
        return self.region.steps + sum(missing for _, missing in gaps_in(self.sequence, self.region))

    @property
    def size(self) -> int:
        """How many nodes all steps have."""
        return self.region.period * self.count

    def rows(self, place: int) -> list[tuple[fx.Node, int]]:
        """Node ``place`` of all steps that are there, with the numbers of these."""
        numbers = numbered(self.sequence, self.region, place)
        return [(self.node(place, at), number) for at, number in enumerate(numbers)]

    def missing(self) -> Iterator[tuple[fx.Node, int, int]]:
        """What somebody reads of steps that are missing: where it stands, its place in a step and the step's number."""
        for gap, _ in gaps_in(self.sequence, self.region):
            for row in self.sequence.missing:
                like, later = cast("tuple[fx.Node, int]", row.args)
                at = self.sequence.position.get(like, -1)
                if self.region.start <= at < self.region.stop and not gap.behind[at]:
                    number, place = divmod(at + gap.period * later - self.region.start, self.region.period)
                    yield row, place, number

    def fixed(self, operand: Operand) -> fx.Node | None:
        """The node whose value an operand has at every step: one from outside, or work that is done before the loop."""
        match operand:
            case Constant(node):
                return node
            case Inner(place) if place in self.invariant:
                return self.node(place, 0)
        return None

    def slice_of(self, place: int) -> SliceOf | None:
        """What a select reads whose index moves along a tensor from outside; None for any other node."""
        match self.operands[place]:
            case [base, _, Index(start, stride)] if (source := self.fixed(base)) is not None:
                return SliceOf(source, self.node(place, 0).args[1], start, stride)
        return None


def analyse(sequence: Sequence, region: Region) -> Step | None:
    """The analysis of a region, shortened at its end where only the last steps' values are used; None if it fails."""
    try:
        return _analysed(sequence, region) if _uniform(sequence, region) else None
    except Gapped:
        return None


def _analysed(sequence: Sequence, region: Region) -> Step | None:
    for _ in range(_TAIL + 1):
        operands = classify(sequence, region)
        if operands is None:
            return None
        step = Step(sequence, region, operands)
        registers = _registers(step)
        if registers is None:
            return None
        step.registers = registers
        _find_invariants(step)
        peel = _outside_uses(step)
        if peel == 0:
            return step if _carriable(step) and _selectable(step) and _readable(step) else None
        region = Region(region.start, region.period, region.steps - peel)
    return None


def _uniform(sequence: Sequence, region: Region) -> bool:
    """Whether every step begins and ends in the same modes, and has only effects that may be repeated."""
    borders = range(region.start, region.stop + 1, region.period)
    nodes = sequence.nodes[region.start : region.start + region.period]
    return all(sequence.modes[at] == sequence.modes[region.start] for at in borders) and not any(
        node.op == "call_module" or in_transform(node) or (has_effect(node) and spelled(node) in _NOT_IN_A_STEP)
        for node in nodes
    )


def _find_invariants(step: Step) -> None:
    """Fill ``invariant``: torch's work that is the same at every step, in the modes around the loop, may be done before
    it; its gradient is then that of the sum over all steps."""
    carried = {register.place for register in step.registers}
    modes = step.sequence.modes[step.region.start : step.region.start + step.region.period]
    module = step.sequence.module
    for place, operands in enumerate(step.operands):
        node = step.node(place, 0)
        same = all(isinstance(operand, Literal) or step.fixed(operand) is not None for operand in operands)
        if (
            same
            and place not in carried
            and modes[place] == modes[0]
            and not has_effect(node)
            and is_torchs(node, module)
        ):
            step.invariant.add(place)


def _registers(step: Step) -> list[Register] | None:
    """Carried values, grouped by the value and its initial ones."""
    groups: list[tuple[int, dict[int, fx.Node]]] = []
    for operand in (operand for operands in step.operands for operand in operands if isinstance(operand, Carried)):
        initial = dict(enumerate(operand.initial, 1))
        for place, known in groups:
            if place == operand.place and all(known.get(ago, node) is node for ago, node in initial.items()):
                known.update(initial)
                break
        else:
            groups.append((operand.place, initial))
    if any(set(known) != set(range(1, len(known) + 1)) for _, known in groups):
        return None
    return [Register(place, tuple(known[ago] for ago in sorted(known))) for place, known in groups]


def _carriable(step: Step) -> bool:
    """Whether all that crosses the border of the step is tensors."""
    places = {register.place for register in step.registers} | set(step.ys)
    initial = [node for register in step.registers for node in register.initial]
    return all(example(step.node(place, 0)) is not None for place in places) and all(
        tensor_of(step.sequence, node) is not None for node in initial
    )


def _readable(step: Step) -> bool:
    """Whether all that the step reads from outside is tensors and submodules."""
    operands = [o for place, row in enumerate(step.operands) if place not in step.invariant for o in row]
    read = [node for operand in operands if isinstance(operand, ItemsOf) for node in operand.nodes]
    read += [node for node in map(step.fixed, operands) if node is not None]
    return all(node.op == "get_attr" or example(node) is not None for node in read)


def tensor_of(sequence: Sequence, node: fx.Node) -> torch.Tensor | None:
    """The example of a node, or the tensor that it names."""
    value = example(node)
    if value is None and node.op == "get_attr":
        value = attribute(sequence.module, node)
    return value if isinstance(value, torch.Tensor) else None


def _selectable(step: Step) -> bool:
    """Whether every index that moves from step to step moves along a tensor from outside."""
    moving = [place for place, row in enumerate(step.operands) if any(isinstance(o, Index) for o in row)]
    return all(step.slice_of(place) is not None for place in moving)


def _outside_uses(step: Step) -> int:
    """Fill ``finals`` and ``ys``; give how many last steps to peel instead, if only they are used outside."""
    region = step.region
    register_of: dict[tuple[int, int], tuple[int, int]] = {}
    for index, register in enumerate(step.registers):
        for ago in range(len(register.initial)):
            register_of.setdefault((register.place, region.steps - 1 - ago), (index, ago))
    tails, wanted = list[int](), _wanted(step)
    used = ((place, r) for place, steps in wanted.items() for r in sorted(steps))
    step.finals |= {each: register_of[each] for each in used if each in register_of}
    numbers = {place: numbered(step.sequence, region, place) for place, _ in step.finals}
    if any(step.count - numbers[place][r] != region.steps - r for place, r in step.finals):
        raise Gapped  # a value so long ago is none of those that are there
    for place, steps in wanted.items():
        if all((place, r) in step.finals for r in steps) or _carried_along(step, place, steps):
            continue
        if min(steps) >= max(region.steps - _TAIL, MIN_STEPS):
            tails.append(region.steps - min(steps))
        step.ys.append(place)
    return max(tails, default=0)


def _wanted(step: Step) -> dict[int, set[int]]:
    """The places of which values are used outside, with the steps that are there; a missing one counts as the first."""
    region, found = step.region, dict[int, set[int]]()
    for r in range(region.steps):
        for place in range(region.period):
            users = step.node(place, r).users
            if not all(_inside(step.sequence, region, user) or is_row(user) for user in users):
                found.setdefault(place, set()).add(r)
    for _, place, _ in step.missing():
        found.setdefault(place, set()).add(0)
    return {place: steps for place, steps in found.items() if place not in step.invariant}


def _carried_along(step: Step, place: int, steps: set[int]) -> bool:
    """Carry a value of which only the last is wanted, though no step reads it, where that is hardly more to keep; it
    begins as another carry of its kind does. Whether that is so."""
    last, node = step.region.steps - 1, step.node(place, 0)
    initial = next((r.initial[:1] for r in step.registers if alike(example(r.initial[0]), example(node))), None)
    if steps != {last} or initial is None:
        return False
    more, *carried = (
        kept_nbytes(step.sequence, each) or 0.0 for each in (node, *(step.node(r.place, 0) for r in step.registers))
    )
    if more > _HARDLY * sum(carried):
        return False
    step.registers.append(Register(place, initial))
    step.finals[place, last] = (len(step.registers) - 1, 0)
    return True


def _inside(sequence: Sequence, region: Region, node: fx.Node) -> bool:
    at = sequence.position.get(node)
    return at is not None and region.start <= at < region.stop
