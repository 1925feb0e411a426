"""Which values of a step are provably 0/1, two constants, or small integers: abstract interpretation of ATen graphs.

A *fact* about a tensor holds for every input of the graph for which the given facts hold, NaN and infinity included,
and for every way to execute the graph (eager; inductor: fused, contracted to FMA, half precision kept in float32
between operations). So arithmetic is followed only over integers of magnitude at most 256 other than -0.0, which every
float format from bfloat16 on represents: rounding, fusing and ``x + 0 -> x`` change nothing there. A constant that is
no such integer (0.9 of ``0.9 * z``) is known where it arises and while it is moved or selected, and ends in the next
arithmetic. Sets are propagated by evaluating the operation itself on all combinations of its operands' values.

Method: Cousot and Cousot, Abstract interpretation, POPL 1977, doi:10.1145/512950.512973.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from reroll.graph.private import is_mutable, is_overload, outside_modes
from reroll.operations import Operation, of
from reroll.segment.facts import (
    FLOATS,
    FOLLOWED,
    INTEGERS,
    WORDS,
    Fact,
    bits,
    constants,
    exact,
    hull,
    one_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Fact", "infer", "infer_carries"]

COMBINATIONS = 16  # of operand values that are tried per operation

PLACES = ("device", "layout", "pin_memory", "memory_format", "non_blocking")  # arguments that change no value


def infer(graph: fx.Graph, given: Mapping[fx.Node, Fact]) -> dict[fx.Node, Fact]:
    """A fact for every node of the graph, in one walk.

    Nothing but dtypes is used of a graph that writes to its values in place. Nodes need ``meta["val"]`` (or
    ``tensor_meta``), as every tracer of torch leaves it; a node without it has an unknown fact.
    """
    functional = not any(_writes(node) for node in graph.nodes)
    facts: dict[fx.Node, Fact] = {}
    with outside_modes(), torch.no_grad():
        for node in graph.nodes:
            dtype = _dtype(node)
            fact = given.get(node) or _transfer(node, facts, dtype) if functional else Fact(dtype)
            facts[node] = bits(torch.bool) if dtype is torch.bool and not fact.known else fact
    return facts


def infer_carries(
    graph: fx.Graph, carry_inputs: Sequence[fx.Node], carry_outputs: Sequence[fx.Node]
) -> tuple[Fact, ...]:
    """One fact per carry that holds at every step if it holds of the initial carry, which a codec checks at run time.

    The search starts from what the outputs hold without any assumption, and from {0, 1} where that is nothing, and
    weakens the assumptions until the outputs confirm them. Ranges that still grow after a few rounds are given up.
    """
    first = infer(graph, {})
    facts = tuple(first[node] if first[node].known else _guess(first[node].dtype) for node in carry_outputs)
    pairs = zip(facts, carry_inputs, strict=True)
    facts = tuple(fact if fact.dtype == _dtype(node) else Fact(_dtype(node)) for fact, node in pairs)
    for patience in itertools.count(-8):
        inferred = infer(graph, dict(zip(carry_inputs, facts, strict=True)))
        joined = tuple(fact.join(inferred[node]) for fact, node in zip(facts, carry_outputs, strict=True))
        if joined == facts:
            return facts
        facts = joined if patience < 0 else tuple(map(_give_up, facts, joined))
    raise AssertionError("unreachable: the count has no end")


def _guess(dtype: torch.dtype | None) -> Fact:
    """The strongest guess for a carry of which nothing is known yet."""
    return Fact() if dtype is None else bits(dtype)


def _give_up(before: Fact, after: Fact) -> Fact:
    return before if before == after else Fact(before.dtype)


def _writes(node: fx.Node) -> bool:
    return is_overload(node.target) and is_mutable(node.target)


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node's tensor, or of all tensors of its list."""
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    if isinstance(value, (list, tuple)) and not hasattr(value, "dtype"):
        dtypes = {getattr(item, "dtype", None) for item in value}
        return dtypes.pop() if len(dtypes) == 1 else None
    return getattr(value, "dtype", None)


def _transfer(node: fx.Node, facts: Mapping[fx.Node, Fact], dtype: torch.dtype | None) -> Fact:
    """The fact that follows from the facts of a node's operands."""
    if dtype is None or node.op not in ("call_function", "get_attr"):
        return Fact(dtype)
    if node.op == "get_attr":
        return _attribute(node, dtype)
    known = of(node.target)
    if known.name == "bernoulli":  # torch's, and that with a rate that is a tensor
        return bits(dtype)
    if known.makes in ("zeros", "ones"):
        return constants(dtype, (known.makes == "ones",))
    if known.number_at is not None:
        value: Any = node.args[known.number_at]
        return Fact(dtype) if isinstance(value, fx.Node) else constants(dtype, (value,))
    sources = _sources(node, known, facts, dtype)
    if sources and all(fact.dtype == dtype and fact.known for fact in sources):
        return functools.reduce(Fact.join, sources)
    if not known.exact and known.moves != "selected":
        return Fact(dtype)
    if known.name == "bitwise_and" and dtype in INTEGERS and 1 in node.args:
        return bits(dtype)
    return _image(node, known, facts, dtype) or _range(node, known, facts, dtype) or Fact(dtype)


def _attribute(node: fx.Node, dtype: torch.dtype) -> Fact:
    """The values of a constant that the tracer lifted; parameters and buffers may change: nothing is said of them."""
    value = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(value, Tensor) or not str(node.target).startswith("_tensor_constant"):
        return Fact(dtype)
    if value.numel() > COMBINATIONS or dtype not in FOLLOWED:
        return Fact(dtype)
    return one_of(dtype, value.detach().cpu().contiguous().view(-1).view(WORDS[dtype.itemsize]).tolist())


def _sources(node: fx.Node, known: Operation, facts: Mapping[fx.Node, Fact], dtype: torch.dtype) -> list[Fact]:
    """Facts of the operands from which a move or a selection takes its elements; empty for other operations."""
    taken: Sequence[Any] = ()
    if known.moves == "selected":
        taken = node.args[1:3] if known.name == "where" else node.args[0:3:2]
    elif known.padded:
        taken = (node.args[0], node.args[2] if len(node.args) > 2 else 0)
    elif known.name == "heaviside":
        return [bits(dtype), facts[node.args[1]]] if isinstance(node.args[1], fx.Node) else []
    elif known.name in ("slice_scatter", "select_scatter"):
        taken = node.args[:2]
    elif known.only_moves and node.args:  # view(dtype), which has elements of its own, changes the dtype
        taken = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args[:1]
    return [facts[item] if isinstance(item, fx.Node) else constants(dtype, (item,)) for item in taken]


def _image(node: fx.Node, known: Operation, facts: Mapping[fx.Node, Fact], dtype: torch.dtype) -> Fact | None:
    """The set of results over all combinations of the operands' constants, by evaluating the operation."""
    inputs = node.all_input_nodes
    sets = [facts[source].values for source in inputs]
    if dtype not in FOLLOWED or not all(sets) or math.prod(map(len, sets)) > COMBINATIONS:
        return None
    moved = known.moves == "selected"
    if not moved and not all(map(exact, itertools.chain.from_iterable(sets))):
        return None
    patterns: set[int] = set()
    for combination in itertools.product(*sets):
        operands = {source: _element(source, value) for source, value in zip(inputs, combination, strict=True)}
        result = _evaluate(node, operands.__getitem__)
        if result is None or result.dtype != dtype:
            return None
        patterns.update(result.view(-1).view(WORDS[dtype.itemsize]).tolist())
    fact = one_of(dtype, patterns)
    rounded = not moved and not all(map(exact, _numbers(node)))
    return None if rounded and fact.bounds is not None else fact  # 1.001 * z is {0, 1} only after rounding


def _range(node: fx.Node, known: Operation, facts: Mapping[fx.Node, Fact], dtype: torch.dtype) -> Fact | None:
    """The range of a cast, or of an operation that is monotone in each operand: it has its extremes at the corners."""
    bounds = [facts[source].bounds for source in node.all_input_nodes]
    if not bounds or None in bounds or dtype not in FLOATS + INTEGERS:
        return None
    if known.casts:
        return hull(dtype, bounds)
    if not known.monotone or not all(map(exact, _numbers(node))):
        return None
    occurrences: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), occurrences.append)
    extremes: list[tuple[int, int] | None] = []
    for corner in itertools.product(*[facts[source].bounds or () for source in occurrences]):
        values = iter(corner)
        result = _evaluate(node, lambda _: torch.tensor(next(values)), integral=True)  # noqa: B023  # used at once
        if result is None or result.is_floating_point():
            return None
        extremes.append((int(result), int(result)))
    return hull(dtype, extremes)


def _element(node: fx.Node, value: bool | int | float) -> Tensor:
    """A tensor of one element, of as many dimensions (none or some) as type promotion looks at."""
    meta: Any = node.meta.get("val", node.meta.get("tensor_meta"))
    return torch.full((1,) if len(meta.shape) else (), value, dtype=meta.dtype, device="cpu")


def _numbers(node: fx.Node) -> list[Any]:
    """The numbers among a node's arguments."""
    return [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, (bool, int, float))]


def _evaluate(node: fx.Node, operand: Callable[[fx.Node], Tensor], integral: bool = False) -> Tensor | None:
    """The operation of a node on small tensors; None where torch cannot do it (then nothing is known of the result)."""
    kwargs = {name: value for name, value in node.kwargs.items() if name not in PLACES}
    args, kwargs = fx.map_arg((node.args, kwargs), operand)
    if integral:
        args = tuple(int(value) if isinstance(value, float) else value for value in args)
        kwargs = {name: int(value) if isinstance(value, float) else value for name, value in kwargs.items()}
    try:
        result = node.target(*args, **kwargs)  # type: ignore[operator]  # call_function nodes have a callable target
    except RuntimeError:
        return None
    return result if isinstance(result, Tensor) else None
