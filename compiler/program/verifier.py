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

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from torch import fx

from reroll.errors import IllegalProgramError
from reroll.program.program import Node, Program, backward, offload, recompute, reverse, save, tape
from reroll.program.rules import PLAYS, Machine, Value, refuse
from reroll.program.tally import Sizes, Tally, count

__all__ = ["Sizes", "Tally", "check", "verify"]

UNITS = Sizes()
UNBOUNDED: Mapping[str, int] = MappingProxyType({})
INSIDE = (recompute, tape, save, backward, reverse, "output")


def _check_codec(machine: Machine, node: Node) -> None:
    """Only save and offload have a keyword, ``codec``: one name per tensor of the carry, if their number is known."""
    if set(node.kwargs) != {"codec"} or node.target not in (save, offload):
        refuse(node, "graph", f"it has the keywords {sorted(node.kwargs)}", "Only save and offload have one, codec")
    codec, tensors = node.kwargs["codec"], len(machine.program.facts)
    named = isinstance(codec, (tuple, list)) and all(isinstance(name, str) for name in codec)
    if not named or (tensors and len(cast(tuple[Any, ...], codec)) not in (0, tensors)):
        found = f"its codec is {codec!r} for a carry of {tensors or 'some'} tensors"
        refuse(node, "codec", found, "Give a tuple with one name for each tensor of the carry")


def _given(machine: Machine, node: Node) -> Value:
    """A program is given its first carry, a part also the gradient at its stop."""
    if len(machine.values) > machine.inside:
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
        return _given(machine, node)
    instruction = node.target if node.op == "call_function" else node.op
    arity, play = PLAYS.get(instruction, (0, None))
    if play is not None and machine.inside and instruction not in INSIDE:
        refuse(node, "part", "it is no instruction for parts", "A part recomputes, tapes, saves and reverses")
    if play is None:
        found = f"{node.op} {node.target!r} is no instruction"
        refuse(node, "graph", found, "Use the instructions of reroll.program.program")
    if len(node.args) != arity:
        found = f"it has {len(node.args)} operands by position"
        refuse(node, "graph", found, f"Give it {arity}, by position")
    if node.kwargs:
        _check_codec(machine, node)
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
