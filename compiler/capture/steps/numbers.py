"""Numbers of a step that become inputs of it: which may, and how a node reads one that is a tensor then.

A number may be another one at each step, or at each length: then one step serves all of them. It is one side of
arithmetic or of a comparison, what a tensor is filled with, or the rate of a draw; never a size, a dimension or an
index. As a tensor without dimensions it promotes unlike a number of Python's, so it is cast where that would tell.

Rates (stochastic depth, dropout that grows with depth): torch draws with a rate that is a number of Python's.
``reroll::bernoulli`` reads the rate off a tensor when it runs, and then draws by torch's own operation: the same
random numbers under the same seed. ``like`` says the size and layout, ``rate`` is how often a one comes.

Stochastic depth: Huang et al., Deep networks with stochastic depth, ECCV 2016, doi:10.1007/978-3-319-46493-0_39.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from reroll.graph.editing import flatten, rebuild
from reroll.graph.effects import example, operation
from reroll.graph.inplace import out_of_place
from reroll.graph.layouts import is_plain, memory_order
from reroll.graph.private import is_operator, map_aggregate
from reroll.recurrence import Numbers, Recurrence

FILLS: dict[Any, int] = {torch.tensor: 0, torch.full: 1, torch.full_like: 1, "new_full": 2}

LIBRARY = torch.library.Library("reroll", "FRAGMENT")
LIBRARY.define(
    "bernoulli(Tensor like, Tensor rate, *, Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl(LIBRARY, "bernoulli", "CompositeExplicitAutograd")
def _bernoulli(like: Tensor, rate: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    return torch.empty_like(like).bernoulli_(float(rate), generator=generator)


def _fake(like: Tensor, rate: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    return torch.empty_like(like)


torch.library.register_fake("reroll::bernoulli", _fake, lib=LIBRARY)
BERNOULLI = torch.ops.reroll.bernoulli.default

_DROPOUTS = (torch.nn.functional.dropout, torch.dropout)
_UPDATE = ("method:bernoulli_", 0)
_SHORT = (torch.float16, torch.bfloat16)
_WHOLE = 1 << 63  # whole numbers of torch's are smaller


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step has a number: leaf ``place`` of the operands of ``node``."""

    node: fx.Node
    place: int
    value: int | float


def movable(step: fx.GraphModule) -> list[Place]:
    """The numbers of a step that may become inputs of it and leave what it gives the same to the bit, in their order.

    Not rates, which would be drawn by another operation. Not what torch computes otherwise with a number of Python's:
    it squares, takes roots, and rounds once in half precision where a tensor without dimensions, or an exponent, is
    rounded, too.
    """
    found = list[Place]()
    for node in step.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        for place, leaf in enumerate(flatten(node)):
            if type(leaf) in (int, float) and may_move(node, place) and _stays(node, leaf):
                found.append(Place(node, place, leaf))
    return found


def _stays(node: fx.Node, number: int | float) -> bool:
    """Whether a node gives the same where its number is a tensor."""
    like = example(node) if fills(node) else _tensor_of(node)
    if like is None or (type(number) is int and not -_WHOLE <= number < _WHOLE):
        return False
    if fills(node):
        return is_plain(memory_order(like))  # random numbers may be drawn into it, in the order of memory
    power, plain = operation(node).name == "pow", _promoted_to(like, number)
    casts = _promoted_to(like, torch.tensor(0, dtype=Numbers((number,)).dtype)) != plain
    return not (plain in _SHORT and (power or casts)) and not (power and float(2 * number).is_integer())


def lifted(recurrence: Recurrence, places: Sequence[Place], dtypes: Sequence[torch.dtype]) -> fx.GraphModule:
    """The step of a recurrence in which numbers are read as per-step inputs of such types, one each, behind those that
    it has."""
    step, first = recurrence.step, recurrence.slots(1).constants.start
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = step.graph.find_nodes(op="placeholder")
    for node in inputs[:first]:
        env[node] = graph.node_copy(node)
    made = [graph.placeholder(f"x_length{at}") for at in range(len(places))]
    reads = {each.node: read for read in zip(places, made, dtypes, strict=True) for each in read[:1]}
    for node in (*inputs[first:], *(each for each in step.graph.nodes if each.op != "placeholder")):
        if node in reads and fills(node):
            env[node] = filled(graph, node, reads[node][1])
            continue
        env[node] = graph.node_copy(node, env.__getitem__)
        if node in reads:
            _put(graph, env[node], *reads[node])
    module = fx.GraphModule(step, graph)
    module.meta = dict(step.meta)
    return module


def _put(graph: fx.Graph, node: fx.Node, read: Place, number: fx.Node, dtype: torch.dtype) -> None:
    """Put an input in the place of a number of a node, which has been copied."""
    leaves, like = flatten(node), _tensor_of(read.node)
    assert like is not None
    with graph.inserting_before(node):
        leaves[read.place] = promoted(graph, number, dtype, like, read.value)
        if node.target is operator.truediv and read.place == 0:  # as torch divides a number by a tensor
            leaves, node.target = [leaves[0], graph.call_method("reciprocal", (leaves[1],))], operator.mul
    node.args, node.kwargs = rebuild(node, leaves)


def _tensor_of(node: fx.Node) -> Tensor | None:
    """The first tensor that a node reads."""
    return next((value for leaf in flatten(node) if (value := example(leaf)) is not None), None)


def may_move(node: fx.Node, place: int) -> bool:
    """Whether leaf ``place`` of a node may be another number at each step: one side of arithmetic, or a filling."""
    if node.target in FILLS:
        at = FILLS[node.target]
        return len(node.args) > at and not isinstance(node.args[at], list | tuple) and place == _leaves(node.args[:at])
    if node.target is out_of_place:
        return _is_update(node) and place == 3
    if len(node.args) != 2 or node.kwargs or place > 1:
        return False
    known = operation(node)  # an operator of ``torch.ops`` takes either a number or a tensor
    moves = (known.arithmetic or known.decision == "compares") and not is_operator(node.target)
    return moves and example(node.args[1 - place]) is not None


def _is_update(node: fx.Node) -> bool:
    """Whether a node is arithmetic in place, of a tensor that is no view and a number or tensor."""
    plain = len(node.args) == 5 and not node.kwargs and node.args[1:3] == ((0,), ((),))
    spelled_out = plain and str(node.args[0]).startswith(("method:", "function:operator:"))
    return spelled_out and operation(node).arithmetic and example(node.args[3]) is not None


def _leaves(operands: tuple[Any, ...]) -> int:
    found: list[Any] = []
    map_aggregate(operands, found.append)
    return len(found)


def fills(node: fx.Node) -> bool:
    """Whether a node fills a tensor with a number."""
    return node.target in FILLS


def filled(graph: fx.Graph, node: fx.Node, number: fx.Node) -> fx.Node:
    """What a node fills with a number, filled with one that is a tensor."""
    value = example(node)
    assert value is not None
    cast = graph.call_method("to", (number,), {"dtype": value.dtype, "device": value.device})
    made = graph.call_method("expand", (cast, tuple(value.shape)))
    made.meta = dict(node.meta)
    return made


def promoted(graph: fx.Graph, number: fx.Node, dtype: torch.dtype, like: torch.Tensor, value: float) -> fx.Node:
    """A number that is a tensor of ``dtype``, cast where it would promote ``like`` unlike the number ``value``."""
    plain = _promoted_to(like, value)
    if _promoted_to(like, torch.tensor(0, dtype=dtype)) == plain:
        return number
    return graph.call_method("to", (number, plain))


def _promoted_to(like: Tensor, value: float | Tensor) -> torch.dtype:
    """The type of what arithmetic makes of a tensor and a number."""
    return torch.result_type(torch.empty((1,) * min(like.dim(), 1), dtype=like.dtype), value)


def is_rate(node: fx.Node, place: int) -> bool:
    """Whether leaf ``place`` of a node is the rate of a draw, and may be another one at each step.

    Not a rate of 0 or 1 of a dropout, which draws nothing then.
    """
    if node.op != "call_function":
        return False
    leaves = flatten(node)
    rate = leaves[place]
    if not isinstance(rate, float):
        return False
    if node.target is out_of_place:
        return tuple(leaves[:2]) == _UPDATE and place == len(leaves) - 1 == 3 and not _needs_gradient(leaves[2])
    return node.target in _DROPOUTS and place == 1 and 0.0 < rate < 1.0 and _trains(node)


def _needs_gradient(root: Any) -> bool:
    value = example(root)
    return value is None or value.requires_grad


def _trains(node: fx.Node) -> bool:
    """Whether a dropout draws, and does not update its operand."""
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
    training = given.get("training", given.get("train", True))
    return training is True and not given.get("inplace", False) and example(given.get("input")) is not None


def draw_with_rate(graph: fx.Graph, node: fx.Node, leaves: list[Any]) -> fx.Node:
    """The same draw with a rate that is a tensor; ``leaves``: the new operands of the draw that ``node`` was."""
    if node.target is out_of_place:
        return _mask(graph, node, leaves[2], leaves[3])
    value, rate = leaves[0], leaves[1]
    keep = graph.call_function(operator.sub, (1, rate))
    mask = _mask(graph, node, graph.call_method("detach", (value,)), keep)
    made = graph.call_function(operator.mul, (value, graph.call_function(operator.truediv, (mask, keep))))
    made.meta = {**node.meta, "random": False}
    return made


def _mask(graph: fx.Graph, node: fx.Node, like: fx.Node, rate: fx.Node) -> fx.Node:
    mask = graph.call_function(BERNOULLI, (like, rate))
    mask.meta = dict(node.meta)
    return mask
