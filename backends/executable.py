"""All of a compiled recurrence that does not change from call to call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reroll.backends.events import Watch
from reroll.backends.lowering import Segment
from reroll.backends.once import Once
from reroll.backends.storage import Tier
from reroll.backends.values import Ledger
from reroll.program import Node, Program, pieces, turn
from reroll.recurrence import Recurrence


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """A node of the program, and the nodes whose last use it is."""

    node: Node
    dead: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """A recurrence with its program and compiled segments: all that does not change from call to call."""

    recurrence: Recurrence
    program: Program
    segments: Mapping[int, Segment]
    tiers: Mapping[str, Tier]
    verify: bool
    watch: Watch
    once: Once
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    ledger: Ledger = field(default_factory=Ledger)

    @classmethod
    def of(
        cls,
        recurrence: Recurrence,
        program: Program,
        segments: Mapping[int, Segment],
        tiers: Mapping[str, Tier],
        verify: bool,
        watch: Watch,
        once: Once,
    ) -> Executable:
        """Split a program at its turn, and note where values die."""
        instructions = _instructions(program)
        at = next(i for i, each in enumerate(instructions) if each.node.target is turn)
        return cls(
            recurrence, program, segments, tiers, verify, watch, once, instructions[: at + 1], instructions[at + 1 :]
        )

    def lengths(self, start: int, stop: int) -> list[int]:
        """The lengths of the segments of a range of steps."""
        return [length for length, count in pieces(stop - start, self.segments) for _ in range(count)]


def _instructions(program: Program) -> tuple[Instruction, ...]:
    last: dict[Node, Node] = {}
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    for node in nodes:
        for source in node.all_input_nodes:
            last[source] = node
    dead: dict[Node, list[Node]] = {}
    for source, user in last.items():
        dead.setdefault(user, []).append(source)
    unused = {node: (node,) for node in nodes if not node.users}
    return tuple(Instruction(node, (*dead.get(node, ()), *unused.get(node, ()))) for node in nodes)
