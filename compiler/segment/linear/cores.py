"""Carries that enter a step linearly, as matrices to which outer products are added: found in the step.

Such a carry is what linear attention, fast weights and retention keep: ``S' = a S + k v^T``, read as ``q^T S``,
where none of ``a``, ``k``, ``v`` and ``q`` depends on ``S``, and ``a`` is one number for each matrix. All else of the
step may be anything. Decays that vary over rows would take as long as steps one by one: for each pair of steps as many
products as there are rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, fx

from reroll.graph.editing import ancestors
from reroll.graph.effects import has_effect
from reroll.graph.layouts import Order, is_dense, memory_order
from reroll.segment.linear.axes import own
from reroll.segment.linear.forms import Factor, Factors, Form, Forms

# Rows and columns of a state from which on products of matrices are faster (benchmarks/results/linear.json).
LEAST = 64
_DTYPES = (torch.float32, torch.float64)  # products of queries and keys could overflow in float16


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """Number ``carry`` of the carries, of ``sizes``, of which ``row`` and ``column`` are those of matrices, and all
    others a batch. ``update``: the next state. ``readouts``: what the rest of the step reads, by its node;
    ``orders``: how the dimensions of each of these lie."""

    carry: int
    sizes: tuple[int, ...]
    row: int
    column: int
    update: Form
    readouts: Mapping[fx.Node, Form]
    orders: Mapping[fx.Node, Order]

    @property
    def factors(self) -> Iterator[Factor]:
        """All that the state is multiplied with, and what is written to it."""
        for form in (self.update, *self.readouts.values()):
            yield from (*form.state, *(form.write or ()))

    @property
    def sources(self) -> set[fx.Node]:
        """The values of the step that it reads."""
        return {factor.source for factor in self.factors if isinstance(factor.source, fx.Node)}


def candidates(graph: fx.Graph, carries: Sequence[Tensor]) -> list[int]:
    """The numbers of the carries of a step that may be linear, as can be told without a look at its values; none where
    its calls have an order to keep, as random numbers have."""
    states = [number for number, carry in enumerate(carries) if may_be_linear(carry)]
    if not states or any(has_effect(node) for node in graph.nodes if node.op not in ("placeholder", "output")):
        return []
    inputs = graph.find_nodes(op="placeholder")[: len(carries)]
    return [number for number in states if _is_alone(graph, inputs, number)]


def cores(step: fx.GraphModule, examples: Sequence[Tensor], candidates: Sequence[int]) -> list[Core]:
    """The linear carries of a step among some, of fake examples of its operands."""
    graph, values = step.graph, _values(step, examples)
    inputs = graph.find_nodes(op="placeholder")
    found = [core for number in candidates if (core := _core(graph, inputs, number, values)) is not None]
    kept = needed(graph, found)
    return [] if any(inputs[core.carry] in kept for core in found) else found


def may_be_linear(state: Tensor) -> bool:
    """Whether a carry is large enough for products of matrices to be faster than steps one by one."""
    return sum(size >= LEAST for size in state.shape) > 1 and state.dtype in _DTYPES


def needed(graph: fx.Graph, cores: Sequence[Core]) -> set[fx.Node]:
    """The nodes that are run one by one: what is given and what cores read, and what these are made of."""
    linear, read = {core.carry for core in cores}, {node for core in cores for node in core.readouts}
    given = [value for number, value in enumerate(nexts(graph)) if number not in linear and isinstance(value, fx.Node)]
    return ancestors([*given, *(source for core in cores for source in core.sources)], stop=read) - read


def nexts(graph: fx.Graph) -> list[Any]:
    """What a step gives: the next carries first."""
    given: Any = graph.output_node().args[0]
    return list(given)


def _is_alone(graph: fx.Graph, carries: Sequence[fx.Node], number: int) -> bool:
    """Whether no other carry depends on a carry and also decides what becomes of it."""
    made_of = [ancestors([value] if isinstance(value, fx.Node) else []) for value in nexts(graph)[: len(carries)]]
    reads = [{at for at, carry in enumerate(carries) if carry in nodes} for nodes in made_of]
    return number in reads[number] and all(
        number not in _onward(reads, other) for other in reads[number] if other != number
    )


def _onward(reads: Sequence[set[int]], number: int) -> set[int]:
    """The carries of which a carry is made in any number of steps."""
    found, todo = set[int](), [number]
    while todo:
        fresh = reads[todo.pop()] - found
        found |= fresh
        todo += fresh
    return found


def _values(step: fx.GraphModule, examples: Sequence[Tensor]) -> Mapping[fx.Node, Any]:
    """What all nodes give."""
    run = fx.Interpreter(step, garbage_collect_values=False)
    with torch.no_grad():
        run.run(*examples)
    return run.env


def _core(graph: fx.Graph, inputs: Sequence[fx.Node], number: int, values: Mapping[fx.Node, Any]) -> Core | None:
    state, after = inputs[number], nexts(graph)[number]
    like: Tensor = values[state]
    forms = Forms(tuple(like.shape), values)
    forms.start(state)
    for node in graph.nodes:
        if node.op.startswith("call"):
            forms.add(node)
    update = forms.found.get(after)
    if update is None or not update.write or update.summed is not None or update.axes != own(like.shape):
        return None
    readouts = _readouts(graph, forms, state, after)
    if readouts is None or not _is_of(like, (update, *readouts.values()), [after, *readouts], values):
        return None
    pairs = permutations((at for at, size in enumerate(like.shape) if size >= LEAST), 2)
    found = next((pair for pair in pairs if _are_matrices(*pair, update, readouts.values())), None)
    orders = {node: memory_order(values[node]) for node in readouts}
    return None if found is None else Core(number, forms.sizes, *found, update, readouts, orders)


def _readouts(graph: fx.Graph, forms: Forms, state: fx.Node, after: fx.Node) -> dict[fx.Node, Form] | None:
    """What the rest of the step reads of the state; None where that is the state itself, or more of it than a row."""
    found: dict[fx.Node, Form] = {}
    for node, form in forms.found.items():
        outside = [user for user in node.users if user not in forms.found]
        if node is after and nexts(graph).count(after) == 1:
            outside = [user for user in outside if user.op != "output"]
        if outside and (form.summed is None or node is state):
            return None
        if outside:
            found[node] = form
    return found


def _is_of(state: Tensor, forms: Sequence[Form], made: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    """Whether all that a state meets lies on its device, and has its type unless that counts for nothing; what is made
    of it has that type, and lies without gaps."""
    sources = [factor.source for form in forms for factor in (*form.state, *(form.write or ()))]
    given = [values[source] for source in sources if isinstance(source, fx.Node)]
    tensors = [value for value in given if isinstance(value, Tensor)]
    results = [values[node] for node in made]
    return (
        all(each.device == state.device for each in tensors)
        and all(each.dtype == state.dtype or (not each.dim() and not each.is_complex()) for each in tensors)
        and all(each.dtype == state.dtype and is_dense(each) for each in results)
    )


def _are_matrices(row: int, column: int, update: Form, readouts: Any) -> bool:
    """Whether two dimensions are the rows and columns of matrices, to which outer products are added."""
    written: Factors = update.write or ()
    apart = all(
        not {row, column} <= factor.has for form in (update, *readouts) for factor in (*form.state, *(form.write or ()))
    )
    outer = any(row in factor.has for factor in written) and any(column in factor.has for factor in written)
    decays = all({row, column}.isdisjoint(factor.has) for factor in update.state)
    return apart and outer and decays and all(_is_read(row, column, form) for form in readouts)


def _is_read(row: int, column: int, form: Form) -> bool:
    """Whether a readout is a sum over rows of what varies over rows alone, or over columns."""
    if form.summed == row:
        return all(column not in factor.has for factor in form.state)
    return form.summed == column
