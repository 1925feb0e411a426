"""Drop the tapes of the forward, and run each interval again from its kept carry when it is reversed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx

from reroll.context import Context
from reroll.instructions import (
    before_turn,
    operands,
    position,
    write_backward,
    write_reverse,
    write_run,
    write_save,
)
from reroll.program import Node, Part, Program, advance, backward, save, tape
from reroll.program import recompute as recompute_instruction
from reroll.registry import register_pass
from reroll.schedule import Interval


@register_pass("recompute")
def recompute(program: Program, context: Context) -> Program:
    """Turn each tape of the forward that is a child of the root, and whose first carry is saved, into an advance.

    Its backward becomes a replay from the saved carry. All other tapes stay, so the program is legal in any order of
    passes; a root without children is left as it is, and so are children that the forward tapes. A replay that needs
    local memory only is a part of the program, written down once for all intervals that are equal.
    """
    graph = fx.Graph()
    children = {(start, start + child.steps): child for start, child in context.root.placed() if not child.taped}
    forward = set(before_turn(program.graph))
    copies: dict[Node, Node] = {}
    saved: dict[int, Node] = {}
    dropped: dict[Node, tuple[int, Interval]] = {}
    parts = _Parts(dict(program.parts))
    for node in program.graph.nodes:
        args = fx.map_arg(operands(node), copies.__getitem__)
        if node.target is tape and node in forward and args[1:] in children and args[1] in saved:
            dropped[node] = args[1], children[args[1:]]
            copies[node] = write_run(graph, advance, *args)
        elif node.target is backward and operands(node)[0] in dropped:
            start, interval = dropped[operands(node)[0]]
            copies[node] = _replay(graph, parts, interval, start, saved[start], args[1])
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.target is save and node in forward:
            saved[position(node)] = copies[node]
    return replace(program, graph=graph, parts=parts.written)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts that are ``written``; of each interval that was ``seen`` (by identity) a number, the same for equal ones,
    and whether all inside of it is kept locally."""

    written: dict[str, Part]
    seen: dict[int, tuple[int, bool, Interval]] = field(default_factory=dict)
    numbers: dict[object, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def look(self, interval: Interval) -> tuple[int, bool, Interval]:
        """Look at an interval, once at each object."""
        if id(interval) not in self.seen:
            inside = [self.look(child) for child in interval.children]
            form = (interval.steps, interval.tier, interval.block, interval.taped, *(number for number, _, _ in inside))
            local = all(deep and child.tier == "local" for _, deep, child in inside)
            self.seen[id(interval)] = self.numbers.setdefault(form, len(self.numbers)), local, interval
        return self.seen[id(interval)]

    def name(self, interval: Interval) -> str:
        """The part that reverses an interval, written if it is not yet."""
        number, _, _ = self.look(interval)
        if number not in self.names:
            graph = fx.Graph()
            carry, grad = graph.placeholder("carry"), graph.placeholder("grad")
            graph.output(_children(graph, self, interval, 0, carry, grad))
            self.names[number] = name = f"part{len(self.written)}_of{interval.steps}"
            self.written[name] = Part(graph, interval.steps)
        return self.names[number]


def _replay(graph: fx.Graph, parts: _Parts, interval: Interval, start: int, kept: Node, grad: Node) -> Node:
    """Write the reversal of an interval from its kept carry; gives the gradient at its start."""
    if not interval.children:
        taped = write_run(graph, tape, kept, start, start + interval.steps)
        return write_backward(graph, taped, grad)
    _, local, _ = parts.look(interval)
    if local:
        return write_reverse(graph, kept, grad, parts.name(interval), start, interval.steps)
    return _children(graph, parts, interval, start, kept, grad)


def _children(graph: fx.Graph, parts: _Parts, interval: Interval, start: int, kept: Node, grad: Node) -> Node:
    """Run over an interval, keeping what its children say, and reverse these."""
    carry, made = kept, []
    for at, child in interval.placed(start):
        if child.taped:
            carry = write_run(graph, tape, carry, at, at + child.steps)
            made.append(carry)
        else:
            made.append(write_save(graph, carry, at) if at > start else kept)
            carry = write_run(graph, recompute_instruction, carry, at, at + child.steps)
    for (at, child), node in reversed(list(zip(interval.placed(start), made, strict=True))):
        grad = write_backward(graph, node, grad) if child.taped else _replay(graph, parts, child, at, node, grad)
    return grad
