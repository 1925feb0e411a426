"""Operations that act on each time step alone: where time is in their result, given where it is in their operands.

Dimensions are followed, never sizes compared with the number of steps: a batch as large as the sequence is long changes
nothing. An operation without a rule, or whose rule says None, mixes the steps as far as is known. Which rule one has
stands in ``reroll.operations``; what is made of nothing but what torch tags as entry by entry goes so, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from reroll.graph.effects import example, operation
from reroll.graph.inplace import out_of_place
from reroll.graph.private import OperationsSeen, is_operator, outside_modes
from reroll.operations import named

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_TABLE = 32  # how many times as large as a step's rows a table is at most whose rows the steps look up


@dataclass(frozen=True, slots=True)
class Rows:
    """Dimension ``dim`` of a value holds ``length`` rows of ``inner`` entries each: time, or time and then batch.

    Rows [first, last) are made in the loop: row r in its step r - shift. ``spread`` are operands without steps of this
    loop that have a row per step all the same, each with its time dimension; ``sizes`` the shape of one row where an
    operation writes it out. ``passes`` marks what only hands rows on: a cat or a narrow over time, with the first row.
    """

    dim: int
    inner: int
    length: int
    shift: int
    first: int
    last: int
    spread: tuple[tuple[fx.Node, int], ...] = ()
    sizes: tuple[int, ...] | None = None
    passes: int | None = None


Rule = Callable[[fx.Node, Mapping[fx.Node, Rows]], Rows | None]


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by its position or name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def shape(node: Any) -> tuple[int, ...]:
    """The shape of a node's value; empty if it is no tensor."""
    value = example(node)
    return tuple(value.shape) if value is not None else ()


def _only(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    """The rows of the first operand, where no other one has any and its shape is known."""
    source = node.args[0] if node.args else None
    timed = [n for n in node.all_input_nodes if n in rows]
    return rows[source] if isinstance(source, fx.Node) and timed == [source] else None


def _taken(rows: Rows, **changes: Any) -> Rows:
    """The rows of a result, without what is said of an operand only."""
    return replace(rows, **{"spread": (), "sizes": None, "passes": None, **changes})


def _joint_rows(rows: Mapping[fx.Node, Rows], dims: Mapping[fx.Node, int], width: int) -> Rows | None:
    """Operands that are read row by row, each with as many dimensions to come before its own as ``dims`` says."""
    timed = [_taken(rows[n], dim=rows[n].dim + dims[n]) for n in dims if n in rows]
    like = timed[0]
    first, last = max(each.first for each in timed), min(each.last for each in timed)
    if any(replace(each, first=first, last=last) != replace(like, first=first, last=last) for each in timed):
        return None
    spread = []
    for other in (n for n in dims if n not in rows):
        at = like.dim - dims[other]
        size = shape(other)[at] if at >= 0 else 1
        if size == 1 and width:
            continue
        if like.inner != 1 or size != like.length:
            return None
        spread.append((other, at))
    return replace(like, first=first, last=last, spread=tuple(spread))


def pointwise(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    """Entry by entry, with broadcasting."""
    tensors, out = [n for n in node.all_input_nodes if example(n) is not None], len(shape(node))
    if example(node) is None or any(n in rows and n not in tensors for n in node.all_input_nodes):
        return None
    return _joint_rows(rows, {n: out - len(shape(n)) for n in tensors}, width=1)


def updated(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    """An update in place, on a copy: of the whole operand or of a view of it, then without other tensors."""
    inputs, views = node.all_input_nodes, node.args[2]
    if node.args[1] == (0,) and views == ((),):
        return pointwise(node, rows)
    if node.args[1] != (0,) or inputs != [node.args[3]] or not all(_whole(step) for step in views[0]):  # type: ignore
        return None
    return _taken(rows[inputs[0]])


def _whole(view: tuple[Any, ...]) -> bool:
    """Whether a view holds every entry of its base once."""
    whole = named(view[0].rpartition(":")[2]).view in ("turned", "reshaped", "sized")
    return whole and not any(isinstance(x, torch.dtype) for x in (*view[1], *view[2].values()))


def _linear(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    source = _only(node, rows)
    return _taken(source) if source and source.dim < len(shape(node.args[0])) - 1 else None


def _matmul(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    return _linear(node, rows) if len(shape(argument(node, 1, "other"))) in (1, 2) else None


def _embedding(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    """A lookup in a table that is no larger than some rows: the gradient of one step is as large as the table.

    Not as ``torch.embedding`` takes its operands, the table first."""
    source, table = _only(node, rows), shape(argument(node, 1, "weight"))
    if is_operator(node.target) or node.target is torch.embedding:
        return None
    mixing = (
        argument(node, 3, "max_norm"),
        argument(node, 5, "scale_grad_by_freq", False),
        argument(node, 6, "sparse"),
    )
    if source is None or any(mixing) or math.prod(table) > _TABLE * math.prod(shape(node)) // source.length:
        return None
    return _taken(source)


def _layer_norm(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    source, normal = _only(node, rows), argument(node, 1, "normalized_shape")
    trailing = len(normal) if isinstance(normal, tuple | list) else 1
    return _taken(source) if source and source.dim < len(shape(node.args[0])) - trailing else None


def _batched(dims: int) -> Rule:
    """Every item of dimension 0 alone, where there are ``dims`` others (any number of them if 0)."""

    def rule(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
        source, others = _only(node, rows), len(shape(node.args[0])) - 1
        return _taken(source) if source and source.dim == 0 and (others == dims or (not dims and others > 1)) else None

    return rule


def _batch_norm(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    source = _only(node, rows)
    return _taken(source) if source and source.dim != 1 and argument(node, 5, "training", False) is False else None


def _prelu(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    """A slope for each entry of dimension 1, or one for all."""
    source, slopes = _only(node, rows), math.prod(shape(argument(node, 1, "weight")))
    return _taken(source) if source and (source.dim != 1 or slopes == 1) else None


def _dims(node: fx.Node, place: int, name: str, default: Any) -> list[int] | None:
    dims = argument(node, place, name, default)
    one_by_one = name == "dims" and isinstance(dims, int)  # as methods take several
    listed: Any = node.args[place:] if one_by_one else [dims] if isinstance(dims, int) else dims
    if not isinstance(listed, tuple | list) or not all(type(d) is int for d in listed) or not listed:
        return None
    return [d % len(shape(node.args[0])) for d in listed]


def _along(place: int, default: Any = None, name: str = "dim", step: int = 0) -> Rule:
    """Along dimensions that are not time: ``step`` of them go (-1) unless the result has as many as the operand."""

    def rule(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
        source, dims = _only(node, rows), _dims(node, place, name, default)
        if source is None or dims is None or source.dim in dims:
            return None
        gone = step and (example(node) is None or len(shape(node)) < len(shape(node.args[0])))
        before = [d for d in dims if d < source.dim] if gone else []
        return _taken(source, dim=source.dim - len(before))

    return rule


def _narrow(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    source, dims = _only(node, rows), _dims(node, 1, "dim", None)
    start, length = argument(node, 2, "start"), argument(node, 3, "length")
    if source is None or dims is None or dims[0] != source.dim:
        return _taken(source) if source and dims else None
    if source.inner != 1 or type(start) is not int or type(length) is not int or start < 0:
        return None
    return _window(source, slice(start, start + length))


def _permute(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    source, rank = _only(node, rows), len(shape(node.args[0]))
    if source is None or rank > len(_PRIMES):
        return None
    marked = torch.empty(_PRIMES[:rank], device="meta")
    args, call = node.args[1:], node.target
    function: Any = getattr(torch.Tensor, call) if isinstance(call, str) else call
    moved = function(marked, *args, **node.kwargs)
    return _taken(source, dim=list(moved.shape).index(_PRIMES[source.dim]))


def _reshape(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    """Time stays in front of what is merged with it, and behind as many entries as before."""
    source, old, new = _only(node, rows), shape(node.args[0]), shape(node)
    if source is None or any(isinstance(arg, torch.dtype) for arg in (*node.args, *node.kwargs.values())):
        return None
    before = math.prod(old[: source.dim])
    for at, size in enumerate(new):
        if math.prod(new[:at]) == before and size % source.length == 0 and size:
            inner = size // source.length
            return _taken(source, dim=at, inner=inner, sizes=(*new[:at], inner, *new[at + 1 :]))
    return None


def _expand(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    source, new = _only(node, rows), shape(node)
    if source is None:
        return None
    dim = source.dim + len(new) - len(shape(node.args[0]))
    return _taken(source, dim=dim, sizes=(*new[:dim], source.inner, *new[dim + 1 :]))


def _cat(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    items: Any = node.args[0]
    if not all(isinstance(item, fx.Node) and example(item) is not None for item in items):
        return None
    timed, rank = [item for item in items if item in rows], len(shape(items[0]))
    dim = argument(node, 1, "dim", 0) % rank
    like = rows[timed[0]]
    if dim != like.dim:
        return _joint_rows(rows, dict.fromkeys(items, 0), width=0)
    sizes = [shape(item)[dim] for item in items]
    if len(timed) > 1 or any(size % like.inner for size in sizes):
        return None
    head = sum(sizes[: items.index(timed[0])]) // like.inner
    length = sum(sizes) // like.inner
    moved = {"shift": like.shift + head, "first": like.first + head, "last": like.last + head}
    return _taken(like, length=length, passes=0, **moved)


def _stack(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    items: Any = node.args[0]
    if not all(isinstance(item, fx.Node) for item in items):
        return None
    made = _joint_rows(rows, dict.fromkeys(items, 0), width=0)
    dim = argument(node, 1, "dim", 0) % (len(shape(items[0])) + 1)
    return made and replace(made, dim=made.dim + (1 if dim <= made.dim else 0))


def _getitem(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    """An item of a tuple of values with rows, or an index that leaves time alone."""
    source, index = _only(node, rows), node.args[1]
    if source is None or example(node.args[0]) is None:
        return source and _taken(source) if isinstance(index, int) else None
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is ... or isinstance(item, slice | int) for item in items):
        return None
    rank = len(shape(node.args[0]))
    at = items.index(...) if ... in items else len(items)
    used = sum(item is not None and item is not ... for item in items)
    items[at : at + 1] = [slice(None)] * (rank - used)
    old = new = 0
    for item in items:
        if old == source.dim and item is not None:
            break
        old += 0 if item is None else 1
        new += 0 if isinstance(item, int) else 1
    if item == slice(None):
        return _taken(source, dim=new)
    plain = all(each == slice(None) for each in items if each is not item)
    return _window(source, item) if plain and source.inner == 1 and isinstance(item, slice) else None


def _window(source: Rows, index: slice) -> Rows | None:
    """A range of rows."""
    if not all(each is None or type(each) is int for each in (index.start, index.stop, index.step)):
        return None
    start, stop, stride = index.indices(source.length)
    if stride != 1 or stop <= start:
        return None
    first, last = max(source.first - start, 0), min(source.last, stop) - start
    return _taken(source, length=stop - start, shift=source.shift - start, first=first, last=last, passes=start)


RULES: Mapping[str, Rule] = {
    "entries": pointwise,
    "reduced": _along(1, step=-1),
    "along": _along(1),
    "pieces": _along(2, 0),
    "one": _along(1, 0, step=-1),
    "turned": _permute,
    "reshaped": _reshape,
    "expanded": _expand,
    "images 1": _batched(2),
    "images 2": _batched(3),
    "images 3": _batched(4),
    "items": _batched(0),
    "normed": _layer_norm,
    "linear": _linear,
    "embedding": _embedding,
    "matmul": _matmul,
    "batch_norm": _batch_norm,
    "narrow": _narrow,
    "cat": _cat,
    "stack": _stack,
    "getitem": _getitem,
    "flip": _along(1, name="dims"),
    "glu": _along(1, -1),
    "prelu": _prelu,
}
"""The rules by their names in ``reroll.operations``."""


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of what a node calls; None where there is none."""
    kind = operation(node).rows
    return RULES[kind] if kind else pointwise if _is_made_of_pointwise(node) else None


def _is_made_of_pointwise(node: fx.Node) -> bool:
    """Whether a node gives a tensor made by operations alone that go entry by entry."""
    if node.target is out_of_place or any(example(each) is None for each in (node, *node.all_input_nodes)):
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), _without_memory)
    function: Any = getattr(torch.Tensor, node.target, None) if isinstance(node.target, str) else node.target
    seen = list[Any]()
    try:
        with outside_modes(), torch.no_grad(), OperationsSeen(seen):
            function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # it takes no tensors without memory
        return False
    return bool(seen) and all(torch.Tag.pointwise in each.tags for each in seen)


def _without_memory(node: fx.Node) -> torch.Tensor:
    value = example(node)
    assert value is not None
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
