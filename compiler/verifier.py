"""The checker: plays a training program on an abstract machine, and refuses it at the first broken rule.

The machine has one forward register, a *frontier* (the steps below it ran once and emitted their outputs) and the
position down to which the steps were reversed. The rules, by the names that errors use:

- ``graph``: one placeholder, one output, in between only instructions, their operands by position.
- ``operand``: what an instruction reads was made before it, by an instruction of the right kind.
- ``register``: a carry made by a run is lost when the next run starts; it must be read before that, or saved.
- ``range``: steps [start, stop) are nonempty, inside [0, T), and cut only at whole segments.
- ``position``: a run starts from the carry at its start; a backward takes the gradient at the stop of its tape.
- ``frontier``: first runs cover [0, T) in order; steps that run again stay below the frontier.
- ``turn``: exactly once, with the carry at T.
- ``reverse``: every step is reversed exactly once, last to first; every tape by exactly one backward.
- ``codec``: one name for each tensor of the carry.
- ``capacity``: no tier holds more than it can.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn, cast

from reroll.errors import IllegalProgramError
from reroll.instructions import RUNS
from reroll.program import (
    Node,
    Program,
    advance,
    backward,
    offload,
    recompute,
    reload,
    save,
    tape,
    turn,
)
from reroll.tally import Sizes, Tally, count

__all__ = ["Sizes", "Tally", "check", "verify"]

UNITS = Sizes()
UNBOUNDED: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Value:
    """What a node made: its kind, the step ``at`` which it is valid, the start of a tape, the steps of a block."""

    kind: str
    at: int = 0
    start: int = 0
    carries: tuple[int, ...] = ()


@dataclass(slots=True)
class _Machine:
    """The state of the abstract machine while it plays ``program``."""

    program: Program
    unreversed: int
    frontier: int = 0
    register: Node | None = None
    turned: Node | None = None
    values: dict[Node, _Value] = field(default_factory=dict)
    open_tapes: dict[Node, None] = field(default_factory=dict)


def _refuse(node: Node, rule: str, found: str, remedy: str) -> NoReturn:
    raise IllegalProgramError(f"Node {node.name!r} breaks the rule {rule!r}: {found}. {remedy}.")


def _value(machine: _Machine, node: Node, operand: object, kinds: tuple[str, ...]) -> _Value:
    """The value that ``node`` reads, which must be of one of ``kinds``."""
    wanted = " or ".join(kinds)
    if not isinstance(operand, Node):
        _refuse(node, "operand", f"it reads {operand!r}, which is not a node", f"Give it the node of a {wanted}")
    value = machine.values.get(operand)
    if value is None:
        _refuse(node, "operand", f"it reads {operand.name!r}, which has not run", f"Place {operand.name!r} before it")
    if value.kind not in kinds:
        found = f"it reads {operand.name!r}, a {value.kind}, where a {wanted} belongs"
        _refuse(node, "operand", found, f"Give it the node of a {wanted}")
    return value


def _carry(machine: _Machine, node: Node, operand: object) -> int:
    """The step at which the carry that ``node`` reads is valid; a carry in the register must be there still."""
    value = _value(machine, node, operand, ("carry", "tape"))
    source = cast(Node, operand)
    in_register = source.op == "placeholder" or source.target in RUNS
    if in_register and source is not machine.register:
        by = machine.register.name if machine.register else "nothing"
        found = f"the carry of {source.name!r} was lost when {by!r} ran"
        _refuse(node, "register", found, f"Save the carry before {by!r} and read the saved one")
    return value.at


def _check_range(machine: _Machine, node: Node, start: object, stop: object) -> None:
    steps, segment = machine.program.steps, machine.program.segment
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= steps:
        found = f"its range is [{start!r}, {stop!r})"
        _refuse(node, "range", found, f"Give it integers with 0 <= start < stop <= {steps}")
    cut = next((edge for edge in (start, stop) if edge % segment and edge != steps), None)
    if cut is not None:
        _refuse(node, "range", f"it cuts a segment of {segment} steps at step {cut}", "Cut at whole segments")


def _run(machine: _Machine, node: Node, source: object, start: int, stop: int) -> _Value:
    """Play ``advance``, ``recompute`` or ``tape``."""
    _check_range(machine, node, start, stop)
    at = _carry(machine, node, source)
    if at != start:
        found = f"it starts at step {start} from the carry at step {at}"
        _refuse(node, "position", found, f"Give it the carry at step {start}")
    frontier = machine.frontier
    first = node.target is advance or (node.target is tape and start >= frontier)
    if first and start != frontier:
        found = f"it runs step {start} for the first time, but the frontier is {frontier}"
        _refuse(node, "frontier", found, "Use recompute below the frontier, and run first runs in order")
    if not first and stop > frontier:
        found = f"it runs up to step {stop} again, but the frontier is {frontier}"
        _refuse(node, "frontier", found, "Use advance for steps that have not run, and cut at the frontier")
    machine.frontier = max(frontier, stop)
    machine.register = node
    if node.target is tape:
        machine.open_tapes[node] = None
    return _Value("tape" if node.target is tape else "carry", stop, start)


def _save(machine: _Machine, node: Node, source: object) -> _Value:
    return _Value("carry", _carry(machine, node, source))


def _offload(machine: _Machine, node: Node, carries: object, tier: object) -> _Value:
    if not isinstance(carries, (tuple, list)) or not carries:
        _refuse(node, "operand", f"it writes {carries!r}", "Give it a tuple of one carry or more")
    if not isinstance(tier, str) or tier in ("", "local", "remote"):
        _refuse(node, "operand", f"its tier is {tier!r}", "Name a remote tier, or use save to keep a carry locally")
    return _Value("block", carries=tuple(_carry(machine, node, each) for each in carries))


def _reload(machine: _Machine, node: Node, block: object) -> _Value:
    return _Value("reloaded block", carries=_value(machine, node, block, ("block",)).carries)


def _getitem(machine: _Machine, node: Node, block: object, index: object) -> _Value:
    carries = _value(machine, node, block, ("reloaded block",)).carries
    if type(index) is not int or not 0 <= index < len(carries):
        found = f"it picks carry {index!r} of a block of {len(carries)}"
        _refuse(node, "operand", found, f"Pick one of 0 to {len(carries) - 1}")
    return _Value("carry", carries[index])


def _turn(machine: _Machine, node: Node, source: object) -> _Value:
    at, steps = _carry(machine, node, source), machine.program.steps
    if machine.turned is not None:
        _refuse(node, "turn", f"the program turned at {machine.turned.name!r} already", "Turn once")
    if at != steps or machine.frontier != steps:
        found = f"it turns at step {at} with the frontier at {machine.frontier}"
        _refuse(node, "turn", found, f"Run all {steps} steps first and give it the last carry")
    machine.turned = node
    return _Value("grad", steps)


def _backward(machine: _Machine, node: Node, taped: object, grad: object) -> _Value:
    value = _value(machine, node, taped, ("tape",))
    above = _value(machine, node, grad, ("grad",)).at
    if value.at != machine.unreversed:
        found = f"it reverses steps [{value.start}, {value.at}), but steps are reversed down to {machine.unreversed}"
        _refuse(node, "reverse", found, f"Reverse a tape that stops at step {machine.unreversed}")
    if above != value.at:
        found = f"it takes the gradient at step {above} for a tape that stops at step {value.at}"
        _refuse(node, "position", found, f"Give it the gradient at step {value.at}")
    machine.unreversed = value.start
    machine.values[cast(Node, taped)] = _Value("reversed tape", value.at)
    del machine.open_tapes[cast(Node, taped)]
    return _Value("grad", value.start)


def _output(machine: _Machine, node: Node, result: object) -> _Value:
    if machine.turned is None:
        _refuse(node, "turn", "the program ends without a turn", "Turn after the last first run")
    if machine.unreversed:
        found = f"steps [0, {machine.unreversed}) were not reversed"
        _refuse(node, "reverse", found, "Reverse every step once")
    for taped in machine.open_tapes:
        _refuse(taped, "reverse", "no backward takes this tape", "Reverse it once, or advance or recompute instead")
    at = _value(machine, node, result, ("grad",)).at
    if at:
        _refuse(node, "position", f"it gives the gradient at step {at}", "Give the gradient at step 0")
    return _Value("output")


PLAYS: Mapping[object, tuple[int, Callable[..., _Value]]] = {
    advance: (3, _run),
    recompute: (3, _run),
    tape: (3, _run),
    save: (1, _save),
    offload: (2, _offload),
    reload: (1, _reload),
    turn: (1, _turn),
    backward: (2, _backward),
    operator.getitem: (2, _getitem),
    "output": (1, _output),
}


def _check_codec(machine: _Machine, node: Node) -> None:
    """Only save and offload have a keyword, ``codec``: one name per tensor of the carry, if their number is known."""
    if set(node.kwargs) != {"codec"} or node.target not in (save, offload):
        _refuse(node, "graph", f"it has the keywords {sorted(node.kwargs)}", "Only save and offload have one, codec")
    codec, tensors = node.kwargs["codec"], len(machine.program.facts)
    named = isinstance(codec, (tuple, list)) and all(isinstance(name, str) for name in codec)
    if not named or (tensors and len(cast(tuple[Any, ...], codec)) not in (0, tensors)):
        found = f"its codec is {codec!r} for a carry of {tensors or 'some'} tensors"
        _refuse(node, "codec", found, "Give a tuple with one name for each tensor of the carry")


def _play(machine: _Machine, node: Node) -> _Value:
    """Play one node."""
    if node.op == "placeholder":
        if machine.values:
            _refuse(node, "graph", "it is not the only first node", "A program has one placeholder, its first carry")
        machine.register = node
        return _Value("carry", 0)
    arity, play = PLAYS.get(node.target if node.op == "call_function" else node.op, (0, None))
    if play is None:
        found = f"{node.op} {node.target!r} is no instruction"
        _refuse(node, "graph", found, "Use the instructions of reroll.program")
    if len(node.args) != arity:
        found = f"it has {len(node.args)} operands by position"
        _refuse(node, "graph", found, f"Give it {arity}, by position")
    if node.kwargs:
        _check_codec(machine, node)
    return play(machine, node, *node.args)


def check(program: Program) -> None:
    """Raise IllegalProgramError, naming the node and the rule, unless the program is legal. Linear in the nodes."""
    machine = _Machine(program, unreversed=program.steps)
    last = None
    for node in program.graph.nodes:
        if last is not None and last.op == "output":
            _refuse(node, "graph", "it comes after the output", "The output is the last node")
        machine.values[node] = _play(machine, node)
        last = node
    if last is None or last.op != "output":
        name = last.name if last else "(none)"
        raise IllegalProgramError(f"Node {name!r} breaks the rule 'graph': it is the last one. End with an output.")


def verify(program: Program, *, sizes: Sizes = UNITS, capacities: Mapping[str, int] = UNBOUNDED) -> Tally:
    """Check a program against all rules and count its costs.

    ``capacities`` are in the units of ``sizes``, by tier ("local", "host", "disk"). Raises IllegalProgramError.
    """
    check(program)
    tally = count(program, sizes)
    nodes = {node.name: node for node in program.graph.nodes}
    for tier, capacity in capacities.items():
        peak = tally.local_peak if tier == "local" else tally.tier_peaks.get(tier, 0)
        if peak > capacity:
            found = f"tier {tier!r} would hold {peak} units, and its capacity is {capacity}"
            _refuse(nodes[tally.peak_nodes[tier]], "capacity", found, "Keep fewer carries, or tape shorter ranges")
    return tally
