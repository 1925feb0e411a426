"""Values that inductor would write out too often.

Inductor does not store the value of a pointwise operation: it writes its formula into every place that reads it, and
stores it where several *nodes* read it and the formula is long. A node that reads a value twice (``lerp(c, c, ...)``,
``c + c``) counts as one reader, so nothing is stored, and the work of inductor doubles at each such node: at the eighth
of eight steps it takes hours. Here the work is counted ahead, and a value is stored where it would grow above a limit.

Private torch API, tried on 2.11, 2.12 and 2.13: ``meta["inductor_realize_to_strides"]`` (a value that is stored).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from reroll.graph.private import is_overload

MOST = 5_000  # evaluations of one formula: inductor makes some dozens of each, 15 us a piece
_LONG, _LONGEST = 50, 100  # operations of a formula: stored if several nodes read it, stored in any case
_HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
_MOVES = frozenset({"cat", "clone", "constant_pad_nd", "index", "select_scatter", "slice_scatter"})


@dataclass(frozen=True, slots=True)
class _Formula:
    """What is written out where a value is read.

    ``terms``: its operations, the numbers in them and the stored values that it loads. ``evaluations``: how often one
    of them is evaluated each time that inductor looks at the formula, which it does without remembering.
    """

    terms: frozenset[object]
    evaluations: int

    @classmethod
    def stored(cls, node: fx.Node) -> _Formula:
        """One load."""
        return cls(frozenset([node]), 1)


def store_repeated(graph: fx.GraphModule, most: int = MOST) -> int:
    """Mark values to be stored, so that no formula is evaluated more than about ``most`` times; how many there are."""
    formulas: dict[fx.Node, _Formula] = {}
    marked = 0
    for node in graph.graph.nodes:
        formula = _formula(node, formulas)
        if formula.evaluations > most:
            node.meta["inductor_realize_to_strides"] = True
            formula, marked = _Formula.stored(node), marked + 1
        formulas[node] = formula
    return marked


def _formula(node: fx.Node, formulas: dict[fx.Node, _Formula]) -> _Formula:
    """The formula of a value, by inductor's own rules of what it stores (``StorageBox.should_realize_on_reuse``)."""
    if not _is_written_out(node):
        return _Formula.stored(node)
    read = [formulas[operand] for operand in _operands(node)]
    terms = frozenset([node, *_numbers(node)]).union(*(each.terms for each in read))
    heavy = any(isinstance(term, fx.Node) and _name(term) in _HEAVY for term in terms)
    if len(terms) > _LONGEST or (len(node.users) > 1 and (heavy or len(terms) > _LONG)):
        return _Formula.stored(node)
    return _Formula(terms, 1 + sum(each.evaluations for each in read))


def _operands(node: fx.Node) -> list[fx.Node]:
    """What is read, twice if it is read twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _numbers(node: fx.Node) -> list[float]:
    return [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, (int, float))]


def _is_written_out(node: fx.Node) -> bool:
    target: Any = node.target
    return is_overload(target) and (target.is_view or torch.Tag.pointwise in target.tags or _name(node) in _MOVES)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return str(target.overloadpacket.__name__) if is_overload(target) else ""
