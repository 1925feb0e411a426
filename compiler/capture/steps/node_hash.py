"""The calls of a graph in program order, as tables of numbers: colours, operands, indices, modes.

The *colour* of a node is its operation, its literals, the structure and shapes of its operands, the identity of the
inputs it reads and the structure of its submodules; integers that index are left out. What else is left out says the
sequence's ``Likeness``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from reroll.capture.folded import Gapped, is_mark, is_row, run_ended, side_of, skipped_runs
from reroll.capture.steps.numbers import is_rate, may_move
from reroll.graph.editing import content_of, flatten
from reroll.graph.effects import attribute, example, is_weight, modes, operation, spelled
from reroll.graph.private import map_aggregate, set_grad_enabled

Ints = npt.NDArray[np.int64]
OUTSIDE = 1 << 40
_MOVING = ("moving",)


class Likeness(IntEnum):
    """What may differ between nodes of one colour; each allows what those before it do.

    ``NUMBERS``: numbers of arithmetic, and inputs that are no parameters. ``WEIGHTS``: parameters, all of them trained
    or all of them frozen, so that blocks over depth are alike. ``FROZEN``: parameters, some trained and some frozen.
    """

    EXACT = 0
    NUMBERS = 1
    WEIGHTS = 2
    FROZEN = 3


@dataclass(frozen=True, slots=True, eq=False)
class Gap:
    """So many ``runs`` of ``period`` nodes are missing at node ``at``. ``behind``: which nodes come after these; not
    all from ``at`` on do, as what reads an entry of a sequence stands beside its reader."""

    at: int
    period: int
    runs: int
    behind: npt.NDArray[np.bool_]


class Sequence:
    """The calls of a normal-form graph in program order, with their colours and operand tables.

    ``operands[i]`` are node i's operands, flattened. ``code`` holds, for all nodes one after another, the position of
    each operand that is a call, or ``OUTSIDE`` + an identity for any other; ``number`` the value of moving integers.
    ``modes[i]`` are the gradient and autocast modes before node i. ``maps``: steps that carry nothing count as steps.
    ``gaps``: where runs of a folded graph are missing; ``missing``: values of these that somebody reads.
    """

    def __init__(
        self, module: fx.GraphModule, graph: fx.Graph, likeness: Likeness = Likeness.EXACT, maps: bool = False
    ) -> None:
        self.module, self.graph, self.likeness, self.maps = module, graph, likeness, maps
        calls = [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]
        self.nodes: list[fx.Node] = [node for node in calls if not is_mark(node) and not is_row(node)]
        self.missing = [node for node in calls if is_row(node)]
        self.gaps = [*self._gaps(calls)] if len(self.nodes) < len(calls) else []
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.operands = [flatten(node) for node in self.nodes]
        self.modes = modes(self.nodes)
        self._hashes: dict[Any, str] = {}
        colours: dict[Any, int] = {}
        self.colour = np.array([colours.setdefault(self._colour(node), len(colours)) for node in self.nodes], np.int32)
        self._tables()

    @property
    def size(self) -> int:
        """How many nodes there are, also those that are missing."""
        return len(self.nodes) + sum(gap.runs * gap.period for gap in self.gaps)

    def _gaps(self, calls: list[fx.Node]) -> Iterator[Gap]:
        """Where runs are missing; of how many nodes they are says the first one behind them."""
        at = 0
        for node in calls:
            if node.target is skipped_runs:
                start, mark = at, node
            elif node.target is run_ended:
                sides = [side_of(each, mark) for each in self.nodes]
                behind = np.array([n >= start if side is None else side for n, side in enumerate(sides)])
                if at > start:
                    yield Gap(start, at - start, mark.args[0], behind)  # type: ignore[arg-type]
                elif sides.count(None) < len(sides):  # else nothing of the runs is left
                    raise Gapped
            at += not is_mark(node) and not is_row(node)

    def _tables(self) -> None:
        outside: dict[Any, int] = {}
        code, number, index = [], [], []
        for node, leaves in zip(self.nodes, self.operands, strict=True):
            select = node.target is torch.select
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, fx.Node):
                    at = self.position.get(leaf)
                    if at is None:
                        at = OUTSIDE + outside.setdefault(self._identity(leaf), len(outside))
                    code.append(at)
                    number.append(0.0)
                else:
                    code.append(-1)
                    number.append(float(leaf) if self._moves(node, place, leaf) else 0.0)
                index.append(select and place == 2)
        self.offset = np.concatenate(([0], np.cumsum([len(leaves) for leaves in self.operands]))).astype(np.int64)
        self.code: Ints = np.array(code, dtype=np.int64)
        self.number = np.array(number, dtype=np.float64)
        self.index = np.array(index, dtype=bool)

    def _identity(self, node: fx.Node) -> Any:
        """Two outside nodes are one value if they are the same node, or submodules or constants of equal content."""
        return self.content(node) if node.op == "get_attr" else node

    def content(self, node: fx.Node) -> str:
        """A text that is equal for get_attr nodes of equal content."""
        if _is_updated(node):
            return f"updated {node.name}"
        value = attribute(self.module, node)
        key = id(value)
        if key not in self._hashes:
            self._hashes[key] = content_of(value)
        return self._hashes[key]

    def _moves(self, node: fx.Node, place: int, leaf: Any) -> bool:
        if isinstance(leaf, bool) or not isinstance(leaf, int | float):
            return False
        if node.target is torch.select:
            return place == 2
        return self.likeness >= Likeness.NUMBERS and (may_move(node, place) or is_rate(node, place))

    def _colour(self, node: fx.Node) -> Any:
        place = -1

        def leaf_colour(leaf: Any) -> Any:
            nonlocal place
            place += 1
            if isinstance(leaf, fx.Node):
                return self.operand_colour(leaf)
            return _MOVING if self._moves(node, place, leaf) else leaf

        operands = map_aggregate((node.args, node.kwargs), leaf_colour)
        target = id(node.target) if node.op == "call_function" else node.target
        return (node.op, target, repr(operands), self._kind(node))

    def operand_colour(self, leaf: fx.Node) -> Any:
        """What an operand must have in common with another one for their readers to be of one colour."""
        if leaf.op == "get_attr":
            value = attribute(self.module, leaf)
            free = isinstance(value, torch.Tensor) and self._may_differ(isinstance(value, torch.nn.Parameter))
            return ("*", self._kind_of(value)) if free else self.content(leaf)
        if leaf.op == "placeholder":
            value = example(leaf)
            free = value is not None and self._may_differ(is_weight(leaf)) and not _is_updated(leaf)
            return ("*", self._kind(leaf)) if free else ("in", leaf.name)
        return ("*", self._kind(leaf))

    def _may_differ(self, weight: bool) -> bool:
        """Whether a tensor from outside may be another one of its kind at each step."""
        return self.likeness >= (Likeness.WEIGHTS if weight else Likeness.NUMBERS)

    def _kind(self, node: fx.Node) -> Any:
        value = example(node)
        return None if value is None else self._kind_of(value)

    def _kind_of(self, value: torch.Tensor) -> Any:
        trained = value.requires_grad if self.likeness == Likeness.WEIGHTS else None
        return tuple(value.shape), value.dtype, value.device, trained


def _is_updated(node: fx.Node) -> bool:
    """Whether an input is written back at the end. What reads it before that is a copy, and no loop, which would hold
    it until its backward."""
    return any(user.target == "copy_" and user.args[0] is node for user in node.users)


def alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two values are tensors of one shape, dtype and device."""
    if one is None or other is None:
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def kept_nbytes(sequence: Sequence, node: fx.Node) -> float | None:
    """The bytes of a value where it is kept from step to step; None if it is no tensor."""
    value = example(node)
    if value is None:
        return None
    return value.numel() * (1 / 8 if _is_spikes(sequence.module, node) else value.element_size())


def _is_spikes(module: torch.nn.Module, node: fx.Node) -> bool:
    """Whether a value is 0 or 1 as it is a comparison's, also in a function with a gradient of its own."""
    value, source = example(node), node.args[0] if node.args else None
    if (value is not None and value.dtype == torch.bool) or operation(node).decision == "compares":
        return True
    if not isinstance(source, fx.Node):
        return False
    forward = forward_of(module, source if node.target is operator.getitem and node.args[1] == 0 else node)
    if forward is not None:
        return _is_spikes(module, forward[1][-1])
    known = operation(node)
    return (known.casts or known.name in ("detach", "clone", "contiguous")) and _is_spikes(module, source)


def forward_of(module: torch.nn.Module, call: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """The operands and the operations of a function with a gradient of its own, the first result of which is the last
    operation's; None if a call is none of such a function. Dynamo gives it among the operands, a record beside."""
    applied: Any = call.args[0] if spelled(call) == "autograd_function_apply" and call.args else None
    given = isinstance(applied, fx.Node) and applied.op == "get_attr"
    body = getattr(attribute(module, applied), "graph", None) if given else call.meta.get("forward")
    if not isinstance(body, fx.Graph):
        return None
    operands, found = body.find_nodes(op="placeholder"), body.output_node().args[0]
    while isinstance(found, tuple | list) and found:
        found = found[0]
    own = [node for node in body.nodes if node.op.startswith("call") and node.target is not set_grad_enabled]
    return (list(operands), own) if own and found is own[-1] else None
