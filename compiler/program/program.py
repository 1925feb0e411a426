"""The training program of one recurrence: a torch.fx graph whose nodes are instructions.

A *carry* is the state from which a step can be run; a *tape* is what the backward of a range of steps needs; a *grad*
is the gradient with respect to the carry at a step. Ranges of steps are half-open. There is one forward register: a
carry made by ``advance``, ``recompute`` or ``tape`` is lost when the next of these three runs, unless it was saved or
offloaded. Every other value lives until its last use, so nothing needs to be freed explicitly.

Nine instructions say everything::

    advance(carry, start, stop)      run steps for the first time, emit their outputs, drop their intermediates -> carry
    recompute(carry, start, stop)    run steps again, emit nothing, drop their intermediates                    -> carry
    tape(carry, start, stop)         run steps and keep their tape; read as a carry it is the carry at ``stop``  -> tape
                                     (with thin=True less of it, and the backward makes the rest again)
    save(carry)                      keep a carry in local memory                                               -> carry
    offload((carry, ...), tier)      write carries to a tier as one block                                       -> block
    reload(block)                    bring a block back to local memory; ``operator.getitem`` picks a carry     -> block
    turn(carry)                      the forward is over; gradients of the outputs are known from here on        -> grad
    backward(tape, grad)             reverse the steps of a tape                                                 -> grad
    reverse(carry, grad, part, at)   reverse the steps of a part of the program from the carry at its first one  -> grad

Steps that run for the first time (by ``advance`` or ``tape``) emit their outputs. A *part* is a program of its own,
kept by name, which is not spelled out where it is played: its steps are counted from its start, it keeps everything in
local memory, and parts may play parts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from reroll.segment.sparsity import Fact

Node = fx.Node


def advance(carry: Any, start: int, stop: int) -> Any:
    """Run steps [start, stop) for the first time, emit their outputs, drop intermediates. Gives the carry at stop."""
    raise NotImplementedError("instructions are executed by a runtime, not called")


def recompute(carry: Any, start: int, stop: int) -> Any:
    """Run steps [start, stop) again, emit nothing, drop their intermediates. Gives the carry at stop."""
    raise NotImplementedError("instructions are executed by a runtime, not called")


def tape(carry: Any, start: int, stop: int, *, thin: bool = False) -> Any:
    """Run steps [start, stop) and keep what their backward needs, or if ``thin`` that from which the backward makes the
    rest again. Read as a carry, a tape is the carry at stop."""
    raise NotImplementedError("instructions are executed by a runtime, not called")


def save(carry: Any, codec: tuple[str, ...] = ()) -> Any:
    """Keep a carry in local memory; ``codec`` names one codec per tensor of the carry (empty: as they are)."""
    raise NotImplementedError("instructions are executed by a runtime, not called")


def offload(carries: tuple[Any, ...], tier: str, codec: tuple[str, ...] = ()) -> Any:
    """Write carries to a tier as one block (one transfer). Gives the block."""
    raise NotImplementedError("instructions are executed by a runtime, not called")


def reload(block: Any) -> Any:
    """Bring an offloaded block back to local memory (one transfer); ``operator.getitem`` picks one of its carries."""
    raise NotImplementedError("instructions are executed by a runtime, not called")


def turn(carry: Any) -> Any:
    """The forward is over. Gives the gradient with respect to the last carry."""
    raise NotImplementedError("instructions are executed by a runtime, not called")


def backward(taped: Any, grad: Any) -> Any:
    """Reverse the steps of a tape: from the gradient at its stop to the gradient at its start."""
    raise NotImplementedError("instructions are executed by a runtime, not called")


def reverse(carry: Any, grad: Any, part: str, at: int) -> Any:
    """Reverse the steps of ``program.parts[part]``, which start at step ``at``. Gives the gradient at their start."""
    raise NotImplementedError("instructions are executed by a runtime, not called")


INSTRUCTIONS = (advance, recompute, tape, save, offload, reload, turn, backward, reverse, operator.getitem)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The reversal of ``steps`` steps, counted from 0: a graph from the carry at 0 and the gradient at their end to the
    gradient at 0."""

    graph: fx.Graph
    steps: int


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A training program over ``steps`` steps, executed in segments of ``segment`` steps.

    ``facts`` holds what the sparsity analysis proved of each tensor of the carry (empty before the analysis), ``parts``
    the parts by name, each after those that it plays. Passes never change a program: they take a ``copy`` and edit its
    graphs.
    """

    graph: fx.Graph
    steps: int
    segment: int
    facts: tuple[Fact, ...] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)

    def copy(self, *, parts: bool = True) -> Program:
        """A program with graphs of its own, free to be edited; without ``parts`` those of the parts are shared, and
        only the graph may be edited."""
        copies = {name: replace(part, graph=_copied(part.graph)) for name, part in self.parts.items()} if parts else {}
        return replace(self, graph=_copied(self.graph), parts=copies or self.parts)

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The graph, then those of the parts."""
        return (self.graph, *(part.graph for part in self.parts.values()))

    def __str__(self) -> str:
        parts = (f"\n{name}, {part.steps} steps: {part.graph}" for name, part in self.parts.items())
        return "".join((str(self.graph), *parts))


def _copied(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        # create_node walks the operands that it is given as a pytree, half of its time: set them afterwards.
        copies[node] = copied = made.create_node(node.op, node.target, name=node.name)
        copied.args = fx.map_arg(node.args, copies.__getitem__)
        if node.kwargs:
            copied.kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
        copied.meta.update(node.meta)
    return made


def store_all(steps: int, segment: int) -> Program:
    """The plain program: tape every step, turn, reverse. Every pipeline starts from it."""
    graph = fx.Graph()
    carry = graph.placeholder("carry")
    taped = graph.call_function(tape, (carry, 0, steps))
    grad = graph.call_function(turn, (taped,))
    graph.output(graph.call_function(backward, (taped, grad)))
    return Program(graph, steps, segment)
