"""First and last turns of a loop that are like the others but for what makes no difference become turns like them.

What differs at the first turn: initial states are made, or read, among its operations; they are inputs; a sum begins
as the number 0; a function with a gradient of its own stands as its forward, as Dynamo writes it where its operand
needs no gradient. At the last turn: what nobody reads is not there, as the graph is without what is dead. Here what is
made or read is moved before the loop, an input goes through a view, the number is a tensor of zeros, the function is
called, and what is missing is computed all the same. All of that gives the same values and gradients; whether the
turns are then the step's, the search says.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from reroll.capture.fills import filled, filling
from reroll.capture.steps.node_hash import Sequence, alike, forward_of
from reroll.capture.steps.operands import Carried, Constant, Inner, Literal
from reroll.capture.steps.step import Step
from reroll.graph.effects import example, has_effect, is_torchs, operation
from reroll.graph.inplace import operand as operand_at
from reroll.graph.inplace import out_of_place, updated_places
from reroll.graph.layouts import is_plain, memory_order
from reroll.graph.lines import take_line

_MOST_ARE_THERE = 3


def even_ends(sequence: Sequence, steps: list[Step]) -> bool:
    """Rewrite the ends of steps in the graph of a sequence; whether anything was rewritten."""
    changed, dead = False, list[fx.Node]()
    borders = [0, *(at for step in steps for at in (step.region.start, step.region.stop)), len(sequence.nodes)]
    for step, low, high in zip(steps, borders[:-2:2], borders[3::2], strict=True):
        changed |= _First(sequence, step, low, dead).even()
        changed |= _last(sequence, step, high)
    for node in reversed(dead):
        sequence.graph.erase_node(node)
    return changed


@dataclass(slots=True)
class _First:
    """The nodes before a step's region, from ``low`` on, compared with the step from the end on.

    ``moving``: those that come before the loop, ``sums``: those that begin with 0, with the node of the step each,
    ``given``: those that read inputs where the step reads what it made, and the inputs; ``inlined``: the last ones of
    forwards, each with the function's result in the step, its operand, and how many nodes they are. ``dead``: what
    nobody reads any more.
    """

    sequence: Sequence
    step: Step
    low: int
    dead: list[fx.Node]
    moving: list[int] = field(default_factory=list)
    sums: dict[int, tuple[fx.Node, Any, Any]] = field(default_factory=dict)
    given: dict[int, list[fx.Node]] = field(default_factory=dict)
    inlined: dict[int, tuple[fx.Node, fx.Node, int]] = field(default_factory=dict)

    def even(self) -> bool:
        """Move what can be moved before the first turn, and make numbers tensors; whether there was any of it."""
        begin = self._compare()
        self.moving = [at for at in self.moving if at > begin]
        found = self.moving or self.sums or self.given or self.inlined
        modes, alone = self.sequence.modes, all(self._stands_alone(at, begin) for at in self.moving)
        if not found or not alone or modes[begin] != modes[self.step.region.start]:
            return False
        front = self.sequence.nodes[begin]
        self._read_views(front)
        for at in sorted(self.moving):
            node = self.sequence.nodes[at]
            number = filling(node)
            front.prepend(node)
            if number is not None:
                self._replace(at, _made_like(node, node, number))
        for at, (like, zero, other) in self.sums.items():
            node = self.sequence.nodes[at]
            zeros = _made_like(node, front, 0)
            with node.graph.inserting_before(node):
                made = node.graph.node_copy(like, {zero: zeros, **other}.__getitem__)
            made.meta = dict(node.meta)
            self._replace(at, made)
        for at, (like, operand, size) in self.inlined.items():
            self._replace(at, _called(self.sequence.nodes[at], like, operand))
            self.dead += self.sequence.nodes[at - size + 1 : at]
        return True

    def _replace(self, at: int, made: fx.Node) -> None:
        node = self.sequence.nodes[at]
        node.replace_all_uses_with(made)
        node.graph.erase_node(node)
        self.sequence.nodes[at] = made
        self.sequence.position[made] = self.sequence.position.pop(node)

    def _read_views(self, front: fx.Node) -> None:
        """Let the first turn read views of inputs, which are made before a node."""
        views = dict[fx.Node, fx.Node]()
        for at, inputs in self.given.items():
            for each in inputs:
                if each not in views:
                    with front.graph.inserting_before(front):
                        views[each] = front.graph.call_method("view_as", (each, each))
                    value = example(each)
                    assert value is not None
                    views[each].meta["example_value"] = value.detach().requires_grad_(value.requires_grad)
                    take_line(views[each], front)
                self.sequence.nodes[at].replace_input_with(each, views[each])

    def _stands_alone(self, at: int, begin: int) -> bool:
        """Whether nothing that a node reads stays behind where it is moved before another one; fills read nothing."""
        node = self.sequence.nodes[at]
        read = [] if filling(node) is not None else [self.sequence.position.get(each) for each in node.all_input_nodes]
        return all(place is None or place < begin or place in self.moving for place in read)

    def _compare(self) -> int:
        """The first node that is like one of the step."""
        sequence, period = self.sequence, self.step.region.period
        at, begin, matched = self.step.region.start - 1, self.step.region.start, 0
        while at >= self.low and matched < period:
            place = -(matched + 1) % period
            same = sequence.colour[at] == sequence.colour[self.step.region.start + place]
            if not same and (forward := self._inlined(at, place)):
                begin, matched, at = at - forward + 1, matched + 2, at - forward
                continue
            if same or self._begins(at, place) or self._is_same_node(at, place):
                begin, matched = at, matched + 1
            elif len(self.moving) == period or not self._can_move(at):
                break
            else:
                self.moving.append(at)
            at -= 1
        return begin

    def _begins(self, at: int, place: int) -> bool:
        """Whether a node adds to the number 0 what one of the step adds to a carry of the same shape."""
        node, like = self.sequence.nodes[at], self.step.node(place, 1)
        mine, others, value = _summands(node), _summands(like), example(node)
        if mine is None or others is None or value is None or not _is_zero(mine[0]):
            return False
        carried = [each for each in self.step.operands[place] if isinstance(each, Carried) and each.delay == 1]
        ago = self.step.node(carried[0].place, 0) if len(carried) == 1 else None
        if ago is None or ago not in others or not isinstance(mine[1], fx.Node) or not alike(value, example(ago)):
            return False
        other = others[1 - others.index(ago)]
        if (
            not is_plain(memory_order(value))
            or not isinstance(other, fx.Node)
            or not alike(example(mine[1]), example(other))
        ):
            return False
        self.sums[at] = (like, ago, {other: mine[1]})
        return True

    def _is_same_node(self, at: int, place: int) -> bool:
        """Whether a node is one of the step but for inputs that it reads in place of what turns before have made."""
        node, like = self.sequence.nodes[at], self.step.node(place, 0)
        mine, others = self.sequence.operands[at], self.sequence.operands[self.step.region.start + place]
        if (node.op, node.target, len(mine)) != (like.op, like.target, len(others)):
            return False
        inputs = list[fx.Node]()
        for leaf, other, operand in zip(mine, others, self.step.operands[place], strict=True):
            if isinstance(operand, Carried | Inner) and isinstance(leaf, fx.Node) and leaf.op == "placeholder":
                if not alike(example(leaf), example(other)) or _is_updated(leaf):
                    return False
                inputs.append(leaf)
            elif isinstance(leaf, fx.Node) != isinstance(other, fx.Node) or self._differ(leaf, other):
                return False
        self.given |= {at: inputs} if inputs else {}
        return bool(inputs)

    def _inlined(self, at: int, place: int) -> int:
        """How many nodes up to this one are the forward of the function whose result one of the step is; 0 if none."""
        like = self.step.node(place, 0)
        call = like.args[0] if like.target is operator.getitem and like.args[1] == 0 else None
        if not isinstance(call, fx.Node) or place == 0 or self.step.node(place - 1, 0) is not call:
            return 0
        forward = forward_of(self.sequence.module, call)
        if forward is None or len(forward[0]) != 1 or len(call.args) != 3:
            return 0
        (source,), own = forward
        here = self.sequence.nodes[max(at - len(own) + 1, self.low) : at + 1]
        operand = here[0].all_input_nodes[0] if here and here[0].all_input_nodes else None
        value = example(operand)
        if operand is None or value is None or value.requires_grad or not alike(value, example(call.args[2])):
            return 0
        apart = any(user not in here for node in here[:-1] for user in node.users)
        if apart or len(here) != len(own) or not _same(own, here, {source: operand}):
            return 0
        self.inlined[at] = (like, operand, len(own))
        return len(own)

    def _differ(self, leaf: Any, other: Any) -> bool:
        """Whether two operands cannot be the same of two turns."""
        if isinstance(leaf, fx.Node):
            leaf, other = self.sequence.operand_colour(leaf), self.sequence.operand_colour(other)
        differ: bool = leaf != other
        return differ

    def _can_move(self, at: int) -> bool:
        """Whether a node is pure, and in the modes of the loop."""
        modes = self.sequence.modes
        return not has_effect(self.sequence.nodes[at]) and modes[at] == modes[self.step.region.start]


def _is_updated(value: fx.Node) -> bool:
    """Whether something updates a value in place: what reads it before that reads a copy, which has to stay one."""
    return any(operand_at(user, place) is value for user in value.users for place in updated_places(user))


def _same(nodes: Many[fx.Node], others: Many[fx.Node], known: dict[fx.Node, fx.Node]) -> bool:
    """Whether nodes do one after another what others do, if some values are those of others."""
    for node, other in zip(nodes, others, strict=True):
        given = fx.map_arg((node.args, node.kwargs), lambda each: known.get(each))
        if (node.op, node.target, *given) != (other.op, other.target, other.args, other.kwargs):
            return False
        known[node] = other
    return True


def _called(before: fx.Node, like: fx.Node, operand: fx.Node) -> fx.Node:
    """A call of a function of the step with an operand, before a node, and its result."""
    graph, call = before.graph, like.args[0]
    assert isinstance(call, fx.Node)
    with graph.inserting_before(before):
        values = dict.fromkeys(call.all_input_nodes, operand)
        values |= {each: graph.get_attr(str(each.target)) for each in values if each.op == "get_attr"}
        applied = graph.node_copy(call, values.__getitem__)
        made = graph.node_copy(like, {call: applied}.__getitem__)
    made.meta = dict(before.meta)
    return made


def _summands(node: fx.Node) -> tuple[Any, Any] | None:
    """What a node adds up, a number first."""
    given = node.args[3:] if node.target is out_of_place else node.args
    if operation(node).name != "add" or len(given) != 2 or node.kwargs:
        return None
    return (given[0], given[1]) if not _is_zero(given[1]) else (given[1], given[0])


def _is_zero(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and given == 0


def _made_like(node: fx.Node, before: fx.Node, number: float) -> fx.Node:
    """A tensor like another one, filled with a number, before a node."""
    value = example(node)
    assert value is not None
    made = filled(before, value, number)
    made.meta["example_value"] = value.detach()
    take_line(made, before)
    return made


def _last(sequence: Sequence, step: Step, high: int) -> bool:
    """Compute what a last turn lacks because nobody reads it; whether there is such a turn before ``high``."""
    region, at = step.region, step.region.stop
    found, missing = dict[int, fx.Node](), list[int]()
    for place in range(region.period):
        if at < high and sequence.colour[at] == sequence.colour[region.stop - region.period + place]:
            found[place] = sequence.nodes[at]
            at += 1
        else:
            missing.append(place)
    few = 0 < len(missing) * _MOST_ARE_THERE <= len(found)  # else a step would be begun that the user never takes
    if not few or not all(_is_unread(step, place, missing) for place in missing):
        return False
    before = step.node(region.period - 1, region.steps - 1)
    for place in range(region.period):
        if place in found:
            before = found[place]
            continue
        like = step.node(place, region.steps - 1)
        values = dict(_moved(step, like, found))
        with sequence.graph.inserting_after(before):
            before = found[place] = sequence.graph.node_copy(like, values.__getitem__)
        before.meta = dict(like.meta)
    return True


def _is_unread(step: Step, place: int, missing: list[int]) -> bool:
    """Whether nothing that is there reads a value in its own turn, and it can be made of what is there."""
    node, known = step.node(place, step.region.steps - 2), (Inner, Carried, Constant, Literal)
    begin = step.region.start + (step.region.steps - 2) * step.region.period
    inside = range(begin, begin + step.region.period)
    readers = [step.sequence.position[user] for user in node.users if user in step.sequence.position]
    unread = all(reader - begin in missing for reader in readers if reader in inside)
    carried = all(each.delay == 1 for each in step.operands[place] if isinstance(each, Carried))
    plain = not has_effect(node) and is_torchs(node, step.sequence.module)  # no gradient where none comes in
    return unread and carried and plain and all(isinstance(o, known) for o in step.operands[place])


def _moved(step: Step, node: fx.Node, found: Mapping[int, fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The operands of a node of the last turn in the region, each with what it is one turn later."""
    region = step.region
    for source in node.all_input_nodes:
        at = step.sequence.position.get(source)
        if at is None or not region.start <= at < region.stop:
            yield source, source
            continue
        turn, place = divmod(at - region.start, region.period)
        yield source, found[place] if turn == region.steps - 1 else step.node(place, turn + 1)
