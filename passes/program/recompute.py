"""Drop the tapes of the forward, and run each interval again from its kept carry when it is reversed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from torch import fx

from reroll.program.context import Context
from reroll.program.program import Node, Part, Program, advance, backward, save, tape
from reroll.program.program import recompute as recompute_instruction
from reroll.program.registry import register_pass
from reroll.program.writing import (
    before_turn,
    operands,
    position,
    write_backward,
    write_reverse,
    write_run,
    write_save,
    write_tape,
)
from reroll.schedules.interval import Interval
from reroll.segment.facts import LOSSY


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
    parts = _Parts(dict(program.parts), cuts=context.codec not in LOSSY)
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
    and whether all inside of it is kept locally; the ``names`` of parts by the numbers of the intervals in them.
    ``cuts``: whether the end of a list may be a part, which runs on from the kept carry. Where that is rounded it may
    not, as what is run would be rounded once more."""

    written: dict[str, Part]
    cuts: bool
    seen: dict[int, tuple[int, bool, Interval]] = field(default_factory=dict)
    numbers: dict[object, int] = field(default_factory=dict)
    names: dict[tuple[int, ...], str] = field(default_factory=dict)

    def look(self, interval: Interval) -> tuple[int, bool, Interval]:
        """Look at an interval, once at each object."""
        if id(interval) not in self.seen:
            inside = [self.look(child) for child in interval.children]
            own = interval.steps, interval.tier, interval.block, interval.taped, interval.thin
            form = (*own, *(number for number, _, _ in inside))
            local = all(deep and child.tier == "local" for _, deep, child in inside)
            self.seen[id(interval)] = self.numbers.setdefault(form, len(self.numbers)), local, interval
        return self.seen[id(interval)]

    def tail(self, children: Sequence[Interval]) -> int:
        """How many of the children, the last ones, are a part of their own: all that they keep is local.

        Trees share their ends, so equal ends are written down once. What is cut off has one of few lengths, sixteen
        for each doubling, so that ends of many lists are equal and parts are nested less than seventy deep in
        lists of a thousand. The carry in front of it is kept anyway, as it is not taped.
        """
        if not self.cuts:
            return 0
        local = takewhile(lambda child: child.tier == "local" and self.look(child)[1], reversed(children[1:]))
        lengths = (length for length, child in enumerate(local, start=1) if _is_end(length) and not child.taped)
        return max(lengths, default=0)

    def name(self, children: Sequence[Interval]) -> str:
        """The part that reverses intervals in a row, written if it is not yet."""
        key = tuple(self.look(child)[0] for child in children)
        if key not in self.names:
            graph = fx.Graph()
            carry, grad = graph.placeholder("carry"), graph.placeholder("grad")
            graph.output(_children(graph, self, children, 0, carry, grad))
            steps = sum(child.steps for child in children)
            self.names[key] = name = f"part{len(self.written)}_of{steps}"
            self.written[name] = Part(graph, steps)
        return self.names[key]


def _is_end(length: int) -> bool:
    """Whether so many children are cut off: multiples of 8, from 256 on of 16, from 512 on of 32, and so on."""
    return length % max(8, (1 << length.bit_length()) >> 5) == 0


def _replay(graph: fx.Graph, parts: _Parts, interval: Interval, start: int, kept: Node, grad: Node) -> Node:
    """Write the reversal of an interval from its kept carry; gives the gradient at its start."""
    if not interval.children:
        taped = write_tape(graph, kept, start, start + interval.steps, interval.thin)
        return write_backward(graph, taped, grad)
    _, local, _ = parts.look(interval)
    if local:
        return write_reverse(graph, kept, grad, parts.name(interval.children), start, interval.steps)
    return _children(graph, parts, interval.children, start, kept, grad)


def _children(graph: fx.Graph, parts: _Parts, children: Sequence[Interval], start: int, kept: Node, grad: Node) -> Node:
    """Run over intervals in a row, keeping what they say, and reverse them."""
    carry, at = kept, start
    made: list[tuple[int, Interval, Node]] = []
    tail = len(children) - parts.tail(children)
    for child in children[:tail]:
        if child.taped:
            carry = write_tape(graph, carry, at, at + child.steps, child.thin)
            made.append((at, child, carry))
        else:
            made.append((at, child, write_save(graph, carry, at) if at > start else kept))
            carry = write_run(graph, recompute_instruction, carry, at, at + child.steps)
        at += child.steps
    if last := children[tail:]:
        steps = sum(child.steps for child in last)
        grad = write_reverse(graph, write_save(graph, carry, at), grad, parts.name(last), at, steps)
    for at, child, node in reversed(made):
        grad = write_backward(graph, node, grad) if child.taped else _replay(graph, parts, child, at, node, grad)
    return grad
