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
- ``part``: parts are known by name, play only parts before them, and run, save and reverse steps that ran before.
- ``capacity``: no tier holds more than it can.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, cast

from torch import fx

from reroll.errors import IllegalProgramError
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
    tape,
    turn,
)
from reroll.program.tally import Sizes, Tally, count
from reroll.program.writing import RUNS

__all__ = ["Sizes", "Tally", "check", "verify"]

UNITS = Sizes()
UNBOUNDED: Mapping[str, int] = MappingProxyType({})
INSIDE = (recompute, tape, save, backward, reverse, "output")


def _check_keywords(machine: Machine, node: Node) -> None:
    """Save and offload have a keyword, ``codec``: one name per tensor of the carry, if their number is known; a tape
    has ``thin``."""
    if node.target is tape and set(node.kwargs) == {"thin"} and isinstance(node.kwargs["thin"], bool):
        return
    if set(node.kwargs) != {"codec"} or node.target not in (save, offload):
        remedy = "Only save and offload have one, codec, and tape one, thin, which is True or False"
        refuse(node, "graph", f"it has the keywords {sorted(node.kwargs)}", remedy)
    codec, tensors = node.kwargs["codec"], len(machine.program.facts)
    named = isinstance(codec, (tuple, list)) and all(isinstance(name, str) for name in codec)
    if not named or (tensors and len(cast(tuple[Any, ...], codec)) not in (0, tensors)):
        found = f"its codec is {codec!r} for a carry of {tensors or 'some'} tensors"
        refuse(node, "codec", found, "Give a tuple with one name for each tensor of the carry")


def _initial_carry(machine: Machine, node: Node) -> Value:
    """A program is given its first carry, a part also the gradient at its stop."""
    if len(machine.values) >= (2 if machine.inside else 1):
        found, remedy = "it is not the only first node", "A program has one placeholder, its first carry"
        if machine.inside:
            found, remedy = "it is the third placeholder", "A part has two, its first carry and its last gradient"
        refuse(node, "graph", found, remedy)
    if machine.values:
        return Value("grad", machine.steps)
    machine.register = node
    return Value("carry", 0)


def _play(machine: Machine, node: Node) -> Value:
    """Play one node."""
    if node.op == "placeholder":
        return _initial_carry(machine, node)
    instruction = node.target if node.op == "call_function" else node.op
    arity, play = PLAYS.get(instruction, (0, None))
    if play is not None and machine.inside and instruction not in INSIDE:
        refuse(node, "part", "it is no instruction for parts", "A part recomputes, tapes, saves and reverses")
    if play is None:
        found = f"{node.op} {node.target!r} is no instruction"
        refuse(node, "graph", found, "Use the instructions of reroll.program")
    if len(node.args) != arity:
        found = f"it has {len(node.args)} operands by position"
        refuse(node, "graph", found, f"Give it {arity}, by position")
    if node.kwargs:
        _check_keywords(machine, node)
    return play(machine, node, *node.args)


def check(program: Program) -> None:
    """Raise IllegalProgramError, naming the node and the rule, unless the program is legal. Linear in the nodes."""
    known: dict[str, int] = {}
    for name, part in program.parts.items():
        machine = Machine(program, part.steps, part.steps, inside=True, known=known, frontier=part.steps)
        try:
            _check_graph(machine, part.graph)
        except IllegalProgramError as error:
            raise IllegalProgramError(f"{error} It is in part {name!r}.") from error
        known[name] = part.steps
    _check_graph(Machine(program, program.steps, program.steps, known=known), program.graph)


def _check_graph(machine: Machine, graph: fx.Graph) -> None:
    last = None
    for node in graph.nodes:
        if last is not None and last.op == "output":
            refuse(node, "graph", "it comes after the output", "The output is the last node")
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
            refuse(nodes[tally.peak_nodes[tier]], "capacity", found, "Keep fewer carries, or tape shorter ranges")
    return tally


class Value(NamedTuple):
    """What a node made: its kind, the step ``at`` which it is valid, the start of a tape, the steps of a block."""

    kind: str
    at: int = 0
    start: int = 0
    carries: tuple[int, ...] = ()


@dataclass(slots=True)
class Machine:
    """The state of the abstract machine while it plays a graph of ``steps`` steps, of the program or of a part of it.

    ``known`` are the parts that it may play, by name, with their steps.
    """

    program: Program
    steps: int
    unreversed: int
    inside: bool = False
    known: dict[str, int] = field(default_factory=dict)
    frontier: int = 0
    register: Node | None = None
    turned: Node | None = None
    values: dict[Node, Value] = field(default_factory=dict)
    open_tapes: dict[Node, None] = field(default_factory=dict)


def refuse(node: Node, rule: str, found: str, remedy: str) -> NoReturn:
    """Raise IllegalProgramError."""
    raise IllegalProgramError(f"Node {node.name!r} breaks the rule {rule!r}: {found}. {remedy}.")


def _value(machine: Machine, node: Node, operand: object, kinds: tuple[str, ...]) -> Value:
    """The value that ``node`` reads, which must be of one of ``kinds``."""
    value = machine.values.get(operand) if isinstance(operand, Node) else None
    if value is not None and value.kind in kinds:
        return value
    wanted = " or ".join(kinds)
    if not isinstance(operand, Node):
        refuse(node, "operand", f"it reads {operand!r}, which is not a node", f"Give it the node of a {wanted}")
    if value is None:
        refuse(node, "operand", f"it reads {operand.name!r}, which has not run", f"Place {operand.name!r} before it")
    else:
        found = f"it reads {operand.name!r}, a {value.kind}, where a {wanted} belongs"
        refuse(node, "operand", found, f"Give it the node of a {wanted}")


def _carry(machine: Machine, node: Node, operand: object) -> int:
    """The step at which the carry that ``node`` reads is valid; a carry in the register must be there still."""
    value = _value(machine, node, operand, ("carry", "tape"))
    source = cast(Node, operand)
    if _runs(machine, source) and source is not machine.register:
        by = machine.register.name if machine.register else "nothing"
        found = f"the carry of {source.name!r} was lost when {by!r} ran"
        refuse(node, "register", found, f"Save the carry before {by!r} and read the saved one")
    return value.at


def _runs(machine: Machine, source: Node) -> bool:
    """Whether a carry lies in the forward register: what a run made, and what the program (but no part) is given."""
    return source.target in RUNS or (source.op == "placeholder" and not machine.inside)


def _check_range(machine: Machine, node: Node, start: object, stop: object) -> None:
    steps, segment = machine.steps, machine.program.segment
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= steps:
        found = f"its range is [{start!r}, {stop!r})"
        refuse(node, "range", found, f"Give it integers with 0 <= start < stop <= {steps}")
    if start % segment or (stop % segment and stop != steps):
        cut = start if start % segment else stop
        refuse(node, "range", f"it cuts a segment of {segment} steps at step {cut}", "Cut at whole segments")


def _run(machine: Machine, node: Node, source: object, start: int, stop: int) -> Value:
    """Play ``advance``, ``recompute`` or ``tape``."""
    _check_range(machine, node, start, stop)
    at = _carry(machine, node, source)
    if at != start:
        found = f"it starts at step {start} from the carry at step {at}"
        refuse(node, "position", found, f"Give it the carry at step {start}")
    frontier = machine.frontier
    first = node.target is advance or (node.target is tape and start >= frontier)
    if first and start != frontier:
        found = f"it runs step {start} for the first time, but the frontier is {frontier}"
        refuse(node, "frontier", found, "Use recompute below the frontier, and run first runs in order")
    if not first and stop > frontier:
        found = f"it runs up to step {stop} again, but the frontier is {frontier}"
        refuse(node, "frontier", found, "Use advance for steps that have not run, and cut at the frontier")
    machine.frontier = max(frontier, stop)
    machine.register = node
    if node.target is tape:
        machine.open_tapes[node] = None
    return Value("tape" if node.target is tape else "carry", stop, start)


def _save(machine: Machine, node: Node, source: object) -> Value:
    return Value("carry", _carry(machine, node, source))


def _offload(machine: Machine, node: Node, carries: object, tier: object) -> Value:
    if not isinstance(carries, (tuple, list)) or not carries:
        refuse(node, "operand", f"it writes {carries!r}", "Give it a tuple of one carry or more")
    if not isinstance(tier, str) or tier in ("", "local", "remote"):
        refuse(node, "operand", f"its tier is {tier!r}", "Name a remote tier, or use save to keep a carry locally")
    return Value("block", carries=tuple(_carry(machine, node, each) for each in carries))


def _reload(machine: Machine, node: Node, block: object) -> Value:
    return Value("reloaded block", carries=_value(machine, node, block, ("block",)).carries)


def _getitem(machine: Machine, node: Node, block: object, index: object) -> Value:
    carries = _value(machine, node, block, ("reloaded block",)).carries
    if type(index) is not int or not 0 <= index < len(carries):
        found = f"it picks carry {index!r} of a block of {len(carries)}"
        refuse(node, "operand", found, f"Pick one of 0 to {len(carries) - 1}")
    return Value("carry", carries[index])


def _turn(machine: Machine, node: Node, source: object) -> Value:
    at, steps = _carry(machine, node, source), machine.steps
    if machine.turned is not None:
        refuse(node, "turn", f"the program turned at {machine.turned.name!r} already", "Turn once")
    if at != steps or machine.frontier != steps:
        found = f"it turns at step {at} with the frontier at {machine.frontier}"
        refuse(node, "turn", found, f"Run all {steps} steps first and give it the last carry")
    machine.turned = node
    return Value("grad", steps)


def _backward(machine: Machine, node: Node, taped: object, grad: object) -> Value:
    value = _value(machine, node, taped, ("tape",))
    above = _value(machine, node, grad, ("grad",)).at
    if value.at != machine.unreversed:
        found = f"it reverses steps [{value.start}, {value.at}), but steps are reversed down to {machine.unreversed}"
        refuse(node, "reverse", found, f"Reverse a tape that stops at step {machine.unreversed}")
    if above != value.at:
        found = f"it takes the gradient at step {above} for a tape that stops at step {value.at}"
        refuse(node, "position", found, f"Give it the gradient at step {value.at}")
    machine.unreversed = value.start
    machine.values[cast(Node, taped)] = Value("reversed tape", value.at)
    del machine.open_tapes[cast(Node, taped)]
    return Value("grad", value.start)


def _reverse(machine: Machine, node: Node, source: object, grad: object, part: object, at: object) -> Value:
    steps = machine.known.get(part) if isinstance(part, str) else None
    if steps is None:
        refuse(node, "part", f"it plays {part!r}, which is no part before it", "Name one of the program's parts")
    _check_range(machine, node, at, at + steps if isinstance(at, int) else None)
    stop, start = cast(int, at) + steps, _carry(machine, node, source)
    if _runs(machine, cast(Node, source)):
        found = f"it reads {cast(Node, source).name!r}, which its own runs overwrite"
        refuse(node, "register", found, "Save the carry and read the saved one")
    above = _value(machine, node, grad, ("grad",)).at
    if start != at or above != stop:
        found = f"it reverses steps [{at}, {stop}) from the carry at step {start} and the gradient at step {above}"
        refuse(node, "position", found, f"Give it the carry at step {at} and the gradient at step {stop}")
    if stop != machine.unreversed or stop > machine.frontier:
        found = f"it reverses steps [{at}, {stop}), but steps ran up to {machine.frontier} and are reversed down to "
        refuse(node, "reverse", f"{found}{machine.unreversed}", f"Reverse a part that stops at {machine.unreversed}")
    machine.unreversed, machine.register = cast(int, at), node
    return Value("grad", cast(int, at))


def _output(machine: Machine, node: Node, result: object) -> Value:
    if machine.turned is None and not machine.inside:
        refuse(node, "turn", "the program ends without a turn", "Turn after the last first run")
    if machine.unreversed:
        found = f"steps [0, {machine.unreversed}) were not reversed"
        refuse(node, "reverse", found, "Reverse every step once")
    for taped in machine.open_tapes:
        refuse(taped, "reverse", "no backward takes this tape", "Reverse it once, or advance or recompute instead")
    at = _value(machine, node, result, ("grad",)).at
    if at:
        refuse(node, "position", f"it gives the gradient at step {at}", "Give the gradient at step 0")
    return Value("output")


PLAYS: Mapping[object, tuple[int, Callable[..., Value]]] = {
    advance: (3, _run),
    recompute: (3, _run),
    tape: (3, _run),
    save: (1, _save),
    offload: (2, _offload),
    reload: (1, _reload),
    turn: (1, _turn),
    backward: (2, _backward),
    reverse: (4, _reverse),
    operator.getitem: (2, _getitem),
    "output": (1, _output),
}
