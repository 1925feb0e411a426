"""A traced graph that updates values of its own, made functional: each update gives a new value instead.

``aot_export_joint_simple`` makes any graph functional while it traces it, in more than twice the time. Most updates
need none of that: they are of a value that the graph has just made, of all its memory, which nobody reads by another
name afterwards, as in ``(a * x).pow_(2)``, or of the statistics of a normalisation that were copied before.

The operation that gives a new value instead is the one of its name whose operands are the same.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from reroll.graph.nested import tensors_of
from reroll.graph.private import is_mutable, is_overload, operands_of, storage_id, written

aten = torch.ops.aten
_NORM, _NORM_OF_COPIES = aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default
_READS = {aten.native_batch_norm_backward.default, _NORM_OF_COPIES}  # named like those that write
_OTHERS = {torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}


def may_write(target: Any) -> bool:
    """Whether an operation may change an operand: normalisations of batches do, though their schemas do not say so."""
    return is_overload(target) and (is_mutable(target) or "batch_norm" in target.name()) and target not in _READS


def is_whole(value: Any) -> bool:
    """Whether a tensor is all of its memory."""
    return isinstance(value, Tensor) and value.untyped_storage().nbytes() == value.nbytes


def made_functional(graph: fx.Graph, mode: Any) -> bool:
    """Have no operation update an operand: whether all that do were replaced. Values are fake ones of ``mode``."""
    updates = [node for node in graph.nodes if may_write(node.target)]
    names = _Names(graph) if updates else None
    return all(names is not None and names.replaced(node, mode) for node in updates)


class _Names:
    """The nodes that give some memory, by its identity, in their order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.order = graph, {node: number for number, node in enumerate(graph.nodes)}
        self.of = defaultdict[int, list[fx.Node]](list)
        for node in graph.nodes:
            self._note(node)

    def _note(self, node: fx.Node) -> None:
        for memory in {storage_id(value) for value in tensors_of(node.meta.get("val"))}:
            self.of[memory].append(node)

    def replaced(self, node: fx.Node, mode: Any) -> bool:
        """Have a node give a new value where it updates one: whether that says the same."""
        target, places = without_update(node.target)
        updated = [node.args[place] for place in places]
        if target is None or not all(self._is_own(node, each) for each in updated):
            return False
        before = [each.meta["val"] for each in updated]  # type: ignore[union-attr]
        with mode:
            made = target(*fx.map_arg(node.args, _value), **fx.map_arg(node.kwargs, _value))
        results = list(made) if isinstance(made, tuple) else [made]
        given = results[-len(places) :]
        if not all(map(_alike, given, before)):
            return False
        behind = [self.of.pop(storage_id(value)) for value in before]
        if isinstance(made, tuple):
            node.meta["val"] = (*node.meta["val"], *given)
        self._hand_on(node, updated, [node] if len(results) == 1 else self._picked(node, len(results), given))
        node.target = target
        for each in sorted({each for found in behind for each in found}, key=self.order.__getitem__):
            if self.order[each] >= self.order[node]:
                run: Any = each.target
                with mode:
                    each.meta["val"] = run(*fx.map_arg(each.args, _value), **fx.map_arg(each.kwargs, _value))
                self._note(each)
        return True

    def _is_own(self, node: fx.Node, updated: Any) -> bool:
        """Whether a value is made in the graph, as all of its memory, which no other name of is read behind a node."""
        if not isinstance(updated, fx.Node) or not is_whole(updated.meta.get("val")):
            return False
        now = self.order[node]
        names = [each for each in self.of[storage_id(updated.meta["val"])] if self.order[each] < now]
        others = [user for each in names if each is not updated for user in each.users]
        return all(each.op == "call_function" for each in names) and all(self.order[user] <= now for user in others)

    def _hand_on(self, node: fx.Node, updated: list[Any], given: list[fx.Node]) -> None:
        now = self.order[node]
        for old, new in zip(updated, given, strict=True):
            old.replace_all_uses_with(new, lambda user: self.order.get(user, now) > now)

    def _picked(self, node: fx.Node, count: int, values: list[Tensor]) -> list[fx.Node]:
        """The last results of a node."""
        found, behind = list[fx.Node](), node
        for number, value in enumerate(values, start=count - len(values)):
            with self.graph.inserting_after(behind):
                behind = self.graph.call_function(operator.getitem, (node, number))
            behind.meta["val"] = value
            self.order[behind] = self.order[node]
            self._note(behind)
            found.append(behind)
        return found


@lru_cache(maxsize=256)
def without_update(target: Any) -> tuple[Any, tuple[int, ...]]:
    """The operation that gives what one writes, behind what that gives, and which operands that writes; None if there
    is none."""
    if target is _NORM:
        return _NORM_OF_COPIES, (3, 4)
    places = tuple(place for place, _ in written(target))
    packet = getattr(aten, target.name().removeprefix("aten::").partition(".")[0].removesuffix("_"), None)
    if places != (0,) or packet is None or not _OTHERS.isdisjoint(target.tags):
        return None, ()
    overloads = [getattr(packet, name) for name in packet.overloads()]
    found = [each for each in overloads if operands_of(each) == operands_of(target) and not is_mutable(each)]
    return (found[0], places) if len(found) == 1 else (None, ())


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _alike(made: Tensor, before: Tensor) -> bool:
    return (made.shape, made.stride(), made.dtype) == (before.shape, before.stride(), before.dtype)
