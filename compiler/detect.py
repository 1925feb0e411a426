"""Find the step that repeats: runs of equal colours in program order, then the relation of every operand.

The *colour* of a node is its operation, its literals, the structure and shapes of its operands, the identity of the inputs it
reads and the structure of its submodules; integers that index are left out. A run of colours that equals itself shifted by
P nodes is a candidate for a step of P nodes. Each operand column of a candidate must keep one relation over its steps:
the same distance back (a value of this step, or a carry of d steps ago), one value from outside, a list of values from
outside, or an index that moves evenly. Longest coverage wins, then the shortest period.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.utils._pytree import tree_flatten

from reroll.normal import example

Ints = npt.NDArray[np.int64]
_OUTSIDE = 1 << 40
MIN_STEPS = 3
_CANDIDATES = 400
_HUGE = 1e12


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes [start, start + period * steps) of the sequence are ``steps`` runs of one step of ``period`` nodes."""

    start: int
    period: int
    steps: int

    @property
    def stop(self) -> int:
        """The first node after the region."""
        return self.start + self.period * self.steps


class Sequence:
    """The calls of a normal-form graph in program order, with their colours and operand tables.

    ``operands[i]`` are node i's operands, flattened. ``code`` holds, for all nodes one after another, the position of
    each operand that is a call, or ``_OUTSIDE`` + an identity for any other; ``number`` the value of moving integers.
    """

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, abstract: bool) -> None:
        self.module, self.graph = module, graph
        self.nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.operands = [flatten(node) for node in self.nodes]
        self.abstract = abstract
        self._hashes: dict[Any, str] = {}
        colours: dict[Any, int] = {}
        self.colour = np.array([colours.setdefault(self._colour(i), len(colours)) for i in range(len(self.nodes))])
        self._tables()

    def _tables(self) -> None:
        outside: dict[Any, int] = {}
        code, number, index = [], [], []
        for node, leaves in zip(self.nodes, self.operands, strict=True):
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, fx.Node):
                    at = self.position.get(leaf)
                    code.append(
                        at if at is not None else _OUTSIDE + outside.setdefault(self._identity(leaf), len(outside))
                    )
                    number.append(0.0)
                else:
                    moving = self._moves(node, place, leaf)
                    code.append(-1)
                    number.append(float(leaf) if moving else 0.0)
                index.append(node.target is torch.select and place == 2)
        self.offset = np.concatenate(([0], np.cumsum([len(leaves) for leaves in self.operands]))).astype(np.int64)
        self.code: Ints = np.array(code, dtype=np.int64)
        self.number = np.array(number, dtype=np.float64)
        self.index = np.array(index, dtype=bool)

    def _identity(self, node: fx.Node) -> Any:
        """Two outside nodes are one value if they are the same node, or submodules or constants of equal content."""
        return self.content(node) if node.op == "get_attr" else node

    def content(self, node: fx.Node) -> str:
        """A text that is equal for get_attr nodes of equal content."""
        value = attribute(self.module, node)
        key = id(value)
        if key not in self._hashes:
            self._hashes[key] = _content(value)
        return self._hashes[key]

    def _moves(self, node: fx.Node, place: int, leaf: Any) -> bool:
        if isinstance(leaf, bool) or not isinstance(leaf, int | float):
            return False
        if node.target is torch.select:
            return place == 2
        return self.abstract and node.target in MOVING_ARITHMETIC

    def _colour(self, index: int) -> Any:
        node = self.nodes[index]
        _, structure = tree_flatten((open_slices(node.args), open_slices(node.kwargs)))
        parts: list[Any] = [
            node.op,
            str(node.target) if node.op != "call_function" else id(node.target),
            str(structure),
        ]
        for place, leaf in enumerate(self.operands[index]):
            if isinstance(leaf, fx.Node):
                parts.append(self._operand_colour(leaf))
            else:
                parts.append("#" if self._moves(node, place, leaf) else repr(leaf))
        value = example(node)
        parts.append(None if value is None else (tuple(value.shape), value.dtype))
        return tuple(parts)

    def _operand_colour(self, leaf: fx.Node) -> Any:
        if leaf.op == "get_attr":
            return self.content(leaf)
        value = example(leaf)
        shape = None if value is None else (tuple(value.shape), value.dtype)
        return ("in", leaf.name) if leaf.op == "placeholder" and not self.abstract else ("*", shape)


def _arithmetic() -> frozenset[Any]:
    import operator

    names = ("add", "sub", "mul", "truediv", "pow", "lt", "le", "gt", "ge", "eq", "ne")
    found = {getattr(operator, name) for name in names}
    return frozenset(found | {torch.add, torch.sub, torch.mul, torch.div, torch.pow})


MOVING_ARITHMETIC = _arithmetic()


def flatten(node: fx.Node) -> list[Any]:
    """All leaves of a node's operands; slices are opened."""
    return tree_flatten((open_slices(node.args), open_slices(node.kwargs)))[0]


def open_slices(value: Any) -> Any:
    """Plain tuples and dicts, with ``slice(a, b, c)`` as ``(("slice",), (a, b, c))``."""
    if isinstance(value, slice):
        return (("slice",), (value.start, value.stop, value.step))
    if isinstance(value, dict):
        return {key: open_slices(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(open_slices(item) for item in value)
    return value


def close_slices(value: Any) -> Any:
    """The inverse of ``open_slices``, but for lists, which become tuples."""
    if isinstance(value, dict):
        return {key: close_slices(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return slice(*value[1]) if value[:1] == (("slice",),) else tuple(close_slices(item) for item in value)
    return value


def attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    """The object that a get_attr node names."""
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def _content(value: Any) -> str:
    if isinstance(value, fx.GraphModule):
        index = {node: place for place, node in enumerate(value.graph.nodes)}
        text = []
        for node in value.graph.nodes:
            if node.op == "get_attr":
                text.append(_content(attribute(value, node)))
                continue
            leaves = [index[x] if isinstance(x, fx.Node) else repr(x) for x in flatten(node)]
            target = "" if node.op == "placeholder" else str(node.target)
            text.append(
                repr(
                    (node.op, target, str(tree_flatten((open_slices(node.args), open_slices(node.kwargs)))[1]), leaves)
                )
            )
        return hashlib.sha256("\n".join(text).encode()).hexdigest()
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and value.numel() <= 64:
        return repr((tuple(value.shape), value.dtype, value.device, value.tolist()))
    return f"object {id(value)}"


def find_regions(sequence: Sequence, low: int = 0, high: int | None = None) -> list[Region]:
    """All regions in a part of the sequence, in program order: the best one, then what is left and right of it."""
    high = len(sequence.nodes) if high is None else high
    best = _best_region(sequence, low, high)
    if best is None:
        return []
    return [*find_regions(sequence, low, best.start), best, *find_regions(sequence, best.stop, high)]


def _best_region(sequence: Sequence, low: int, high: int) -> Region | None:
    best: Region | None = None
    for tried, (covered, period, start, stop) in enumerate(repeats(sequence.colour[low:high])):
        size = best.period * best.steps if best else 0
        if tried >= _CANDIDATES or size + period >= covered or size >= covered:
            break
        for first in dict.fromkeys((_rotation(sequence, low + start, low + stop, period), low + start)):
            region = _window(sequence, Region(first, period, (low + stop - first) // period))
            if region is not None and (best is None or region.period * region.steps > best.period * best.steps):
                best = region
                break
    return best


def repeats(colour: npt.NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """(covered nodes, period, start, stop) of maximal runs that repeat; longest first, then shortest period."""
    found = []
    size = len(colour)
    for period in range(1, size // 2 + 1):
        same = np.concatenate(([0], (colour[:-period] == colour[period:]).view(np.int8), [0]))
        edges = np.flatnonzero(np.diff(same))
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if stop - start >= 2 * period:
                found.append((stop - start + period, period, start, stop + period))
    return sorted(found, key=lambda run: (-run[0], run[1]))


def _rotation(sequence: Sequence, start: int, stop: int, period: int) -> int:
    """The first node of a step, chosen so that the fewest bytes cross from step to step."""
    live = np.zeros(stop - start + 1)
    for at in range(start, stop):
        node = sequence.nodes[at]
        if node.target is torch._C._set_grad_enabled:
            live[at + 1 - start] += -_HUGE if node.args[0] else _HUGE
        uses = [p for user in node.users if (p := sequence.position.get(user)) is not None and at < p < stop]
        if uses:
            value = example(node)
            weight = float(value.numel() * value.element_size()) if value is not None else _HUGE
            live[at + 1 - start] += weight
            live[max(uses) + 1 - start] -= weight
    crossing = np.cumsum(live)
    middle = max((stop - start) // period // 2, 1) * period
    costs = [(crossing[min(middle + shift, stop - start)], shift) for shift in range(period)]
    fitting = [(cost, shift) for cost, shift in costs if stop - start - shift >= 3 * period]
    return start + (min(fitting)[1] if fitting else 0)


def columns(sequence: Sequence, region: Region) -> tuple[Ints, npt.NDArray[np.float64]]:
    """Operand codes and moving numbers of a region, one row a step."""
    first, last = sequence.offset[region.start], sequence.offset[region.stop]
    return (
        sequence.code[first:last].reshape(region.steps, -1),
        sequence.number[first:last].reshape(region.steps, -1),
    )


def relations(sequence: Sequence, region: Region) -> Ints:
    """Each operand's relation: the distance back from the first node of its step, or ``_OUTSIDE`` + identity."""
    code, _ = columns(sequence, region)
    base = region.start + region.period * np.arange(region.steps)[:, None]
    return np.where(code >= _OUTSIDE, code, np.where(code < 0, _OUTSIDE - 1, base - code))


def delay(relation: int, period: int) -> int:
    """How many steps ago a value at this distance was made; 0 for a value of the same step."""
    return -(-relation // period) if relation > 0 else 0


def _window(sequence: Sequence, region: Region) -> Region | None:
    """The longest stretch of steps over which every operand keeps its relation."""
    if region.steps < MIN_STEPS:
        return None
    code, number = columns(sequence, region)
    relation = relations(sequence, region)
    first = sequence.offset[region.start]
    moving = number[:, sequence.index[first : first + number.shape[1]]]
    breaks = sorted({*_relation_breaks(relation, code, region), *_index_breaks(moving)})
    best = (0, 0)
    for low in sorted({0, *(at - back + 1 for at, back in breaks), *(at for at, _ in breaks)}):
        high = min((at for at, back in breaks if at >= low + back), default=region.steps)
        if low >= 0 and high - low > best[1] - best[0]:
            best = (low, high)
    found = Region(region.start + best[0] * region.period, region.period, best[1] - best[0])
    return found if found.steps >= MIN_STEPS and classify(sequence, found) else None


def _relation_breaks(relation: Ints, code: Ints, region: Region) -> Iterator[tuple[int, int]]:
    """(step, delay): a window [l, h) may hold the step only among its first ``delay`` ones."""
    outside = (code < region.start) | (code >= _OUTSIDE)
    for at_column in np.flatnonzero(np.any(relation != relation[:1], axis=0)):
        column = relation[:, at_column]
        identity = np.where(outside[:, at_column], code[:, at_column], -1)
        repeated = np.count_nonzero(identity[1:] == identity[:-1]) >= len(column) // 2
        if np.all(outside[:, at_column]) and not repeated:
            continue  # another value from outside at every step: a list
        kept = code[:, at_column] if np.count_nonzero(outside[:, at_column]) > len(column) // 2 else column
        steady = _longest_run_value(kept)
        back = 0 if kept is not column else delay(steady, region.period)
        for at in np.flatnonzero(kept != steady).tolist():
            yield at, back


def _longest_run_value(column: Ints) -> int:
    edges = np.flatnonzero(np.concatenate(([True], column[1:] != column[:-1], [True])))
    return int(column[edges[int(np.argmax(np.diff(edges)))]])


def _index_breaks(number: npt.NDArray[np.float64]) -> Iterator[tuple[int, int]]:
    """Steps at which an index leaves its even movement; a break of the slope excludes what is before or after it."""
    slopes = np.diff(number, axis=0)
    for column in slopes.T[np.any(np.abs(slopes - slopes[:1]) > 1e-9, axis=0)]:
        rounded = np.round(column * 2**32).astype(np.int64)
        steady = _longest_run_value(rounded)
        for at in np.flatnonzero(rounded != steady).tolist():
            yield at + 1, 1


@dataclass(frozen=True, slots=True)
class Operand:
    """The relation of one operand of a step: its ``kind``, and what belongs to it.

    ``step``: the value of node ``node`` of the same step. ``carry``: that of ``delay`` steps ago, before which it is
    ``outside[0], outside[1], ...`` at steps 0, 1, ... ``constant``: ``outside[0]``. ``items``: ``outside[r]`` at step r.
    ``index``: ``start + stride * r`` at step r. ``numbers``: ``values[r]``. ``literal``: as it stands.
    """

    kind: str
    node: int = 0
    delay: int = 0
    outside: tuple[fx.Node, ...] = ()
    start: int = 0
    stride: int = 0
    values: tuple[float, ...] = ()


def classify(sequence: Sequence, region: Region) -> list[list[Operand]] | None:
    """The relation of every operand, one list a node of the step; None if one has none, or nothing is carried."""
    code, number = columns(sequence, region)
    relation = relations(sequence, region)
    leaves = [sequence.operands[at] for at in range(region.start, region.stop)]
    found: list[list[Operand]] = []
    column = 0
    for place in range(region.period):
        operands = []
        for slot in range(len(leaves[place])):
            nodes = tuple(leaves[r * region.period + place][slot] for r in range(region.steps))
            index = bool(sequence.index[sequence.offset[region.start] + column])
            operand = _operand(region, nodes, code[:, column], relation[:, column], number[:, column], index)
            if operand is None:
                return None
            operands.append(operand)
            column += 1
        found.append(operands)
    return found if any(operand.kind == "carry" for operands in found for operand in operands) else None


def _moving(values: Any, number: npt.NDArray[np.float64], index: bool) -> Operand | None:
    slopes = np.diff(number)
    if not np.any(slopes):
        return Operand("literal")
    if not index:
        return Operand("numbers", values=tuple(values))
    even = bool(np.all(slopes == slopes[0]))
    return Operand("index", start=int(number[0]), stride=int(slopes[0])) if even else None


def _operand(
    region: Region, nodes: Any, code: Ints, relation: Ints, number: npt.NDArray[np.float64], index: bool
) -> Operand | None:
    if not isinstance(nodes[-1], fx.Node):
        return _moving(nodes, number, index)
    outside = (code < region.start) | (code >= _OUTSIDE)
    if outside[-1]:
        if not np.all(outside):
            return None
        return Operand("constant", outside=nodes[:1]) if np.all(code == code[0]) else Operand("items", outside=nodes)
    back = delay(int(relation[-1]), region.period)
    if np.any(relation[back:] != relation[-1]) or not np.all(outside[:back]):
        return None
    place = int(back * region.period - relation[-1])
    return Operand("carry", place, back, nodes[:back]) if back else Operand("step", place)
