"""Random draws whose rate is another one at each step: stochastic depth, dropout that grows with depth.

torch draws with a rate that is a number of Python's, and a number that is an input of the step is a tensor.
``reroll::bernoulli`` reads the rate off that tensor when it runs, and then draws by torch's own operation: the same
random numbers under the same seed. ``like`` says the size and layout, ``rate`` is how often a one comes.

Stochastic depth: Huang et al., Deep networks with stochastic depth, ECCV 2016, doi:10.1007/978-3-319-46493-0_39.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from reroll.graph.editing import flatten
from reroll.graph.effects import example
from reroll.graph.inplace import out_of_place

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


def drawn(graph: fx.Graph, node: fx.Node, leaves: list[Any]) -> fx.Node:
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
