"""A second, independent reading of the instructions: it runs a program on an exact toy recurrence.

The register is one variable that every run really overwrites; a tape is consumed by its backward. Nothing is checked:
a wrong program gives wrong integers, or fails. All arithmetic is modulo a prime, so equal means equal.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reroll.program.context import Context
from reroll.program.program import (
    Node,
    Program,
    advance,
    backward,
    offload,
    recompute,
    reload,
    reverse,
    save,
    store_all,
    tape,
    turn,
)
from reroll.program.registry import run
from reroll.schedules.interval import Interval
from reroll.schedules.named import tree
from reroll.schedules.problem import Problem

PRIME = 2_147_483_647
RUNS = (advance, recompute, tape)
DECIDE = "sparsity,save,recompute,offload"


@dataclass(frozen=True)
class Outcome:
    """Outputs in the order of their emission, the last carry, gradients of the inputs and of the carry at 0."""

    outputs: tuple[tuple[int, int], ...]
    last: int
    inputs: tuple[tuple[int, int], ...]
    grad: int


@dataclass
class Toy:
    """c' = 3 c^2 + 5 c + x_t, y_t = w_t c', loss = (sum of y)^2 + c_T^2, with x_t and w_t all different."""

    program: Program
    steps: int
    origin: int = 0
    register: int = 1234567
    values: dict[Node, Any] = field(default_factory=dict)
    outputs: list[tuple[int, int]] = field(default_factory=list)
    inputs: list[tuple[int, int]] = field(default_factory=list)
    total: int = 0
    last: int = 0

    def read(self, node: Node) -> int:
        """A carry; one that a run made is whatever the register holds now."""
        if node.target in RUNS or self.values[node] is None:
            return self.register
        return int(self.values[node])

    def forward(self, node: Node) -> list[tuple[int, int]]:
        source, start, stop = node.args
        assert isinstance(source, Node)
        assert isinstance(start, int)
        assert isinstance(stop, int)
        carry, taped = self.read(source), []
        for t in range(self.origin + start, self.origin + stop):
            taped.append((t, carry))
            carry = (3 * carry * carry + 5 * carry + 1009 * t * t + 7 * t + 11) % PRIME
            emitted = any(t == done for done, _ in self.outputs)
            if node.target is advance or (node.target is tape and not emitted):
                self.outputs.append((t, (t + 2) * carry % PRIME))
        self.register = carry
        return taped

    def reverse(self, taped: list[tuple[int, int]], grad: int) -> int:
        for t, carry in reversed(taped):
            grad = (grad + 2 * self.total * (t + 2)) % PRIME
            self.inputs.append((t, grad))
            grad = grad * (6 * carry + 5) % PRIME
        taped.clear()
        return grad

    def turn(self, node: Any) -> int:
        self.last = self.read(node)
        self.total = sum(y for _, y in self.outputs) % PRIME
        assert len(self.outputs) == self.steps, "gradients of the outputs need all outputs"
        return 2 * self.last % PRIME

    def execute(self, node: Node) -> Any:
        args: tuple[Any, ...] = node.args
        plays: dict[Any, Callable[[], Any]] = {
            save: lambda: self.read(args[0]),
            offload: lambda: tuple(self.read(each) for each in args[0]),
            reload: lambda: self.values[args[0]],
            operator.getitem: lambda: self.values[args[0]][args[1]],
            turn: lambda: self.turn(args[0]),
            backward: lambda: self.reverse(self.values[args[0]], self.values[args[1]]),
            reverse: lambda: self.play_part(*args),
        }
        return self.forward(node) if node.target in RUNS else plays[node.target]()

    def play_part(self, source: Node, grad: Node, name: str, at: int) -> int:
        carry, part = self.read(source), self.program.parts[name]
        given = iter((carry, self.values[grad]))
        self.origin += at
        for node in part.graph.nodes:
            if node.op == "output":
                self.origin -= at
                return int(self.values[node.args[0]])
            self.values[node] = next(given) if node.op == "placeholder" else self.execute(node)
        raise AssertionError("no output")


def play(program: Program) -> Outcome:
    """Run a program on the toy recurrence."""
    toy = Toy(program, program.steps)
    for node in program.graph.nodes:
        if node.op == "output":
            return Outcome(tuple(toy.outputs), toy.last, tuple(toy.inputs), toy.values[node.args[0]])
        toy.values[node] = None if node.op == "placeholder" else toy.execute(node)
    raise AssertionError("no output")


def reference(steps: int) -> Outcome:
    """What every legal program of that many steps gives."""
    return play(store_all(steps, 1))


def root_of(name: str, steps: int, segment: int = 1, chunk: int = 1, slots: int = 1, tier: str = "disk") -> Interval:
    """The tree of a named schedule."""
    return tree(name, Problem(steps, segment, chunk=chunk, slots=slots, tier=tier))


def built(
    schedule: str, steps: int, chunk: int, slots: int, *, segment: int = 1, passes: str | Sequence[str] = DECIDE
) -> Program:
    """The program of a named schedule, remote on the disk, after some passes."""
    return run(passes, store_all(steps, segment), Context(root_of(schedule, steps, segment, chunk, slots)))
