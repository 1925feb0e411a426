"""What is made under ``no_grad`` and read with gradients, cut off where it is read: no gradient flows there in eager.

Afterwards operations may be moved from one mode to the other: a row that is read without gradients may be read in the
step that uses it, and rows may be handed on that were written without gradients.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from reroll.graph.effects import example, grad_enabled, modes, spelled
from reroll.graph.lines import take_line
from reroll.operations import named, of

_MANY = 3
_MAYBE_ITSELF = ("contiguous", "reshape", "flatten", "ravel", "expand_as", "broadcast_to")  # give no view, at times


def cut_gradients(graph: fx.Graph) -> None:
    """Put a ``detach`` between what is made without gradients and those who read it with them: right before the first
    of a few, so that a last turn of a loop is like the others; where many read, as all steps may, behind the value."""
    nodes = list(graph.nodes)
    without = {node for node, mode in zip(nodes, modes(nodes), strict=False) if not grad_enabled(mode)}
    if not without:
        return
    would = set[fx.Node]()  # need a gradient, were they made with gradients
    for node in nodes:
        if node not in without:
            continue
        if not any(each in would or _may_need_gradient(each) for each in node.all_input_nodes):
            continue
        would.add(node)
        readers = [user for user in node.users if _is_cut_off(node, user) and user not in without]
        if readers:
            made = cut(graph, node, min(readers) if len(readers) < _MANY else node.next)
            for user in readers:
                user.replace_input_with(node, made)


def cut(graph: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    """A value without its history, as a node before another one."""
    with graph.inserting_before(before):
        made = graph.call_method("detach", (node,))
    value = example(node)
    made.meta["example_value"] = None if value is None else value.detach()
    take_line(made, node)
    return made


def is_cut(node: Any) -> bool:
    """Whether a node is what ``cut`` makes."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == "detach" and not node.kwargs


def _is_cut_off(node: fx.Node, reader: fx.Node) -> bool:
    """Whether no gradient flows from a reader to what is made without gradients. A view that is made so says that it
    needs one where its base does, and has no history; what is updated or given back as it is keeps its own."""
    value = example(node)
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return False
    return not value.requires_grad or (_is_view(node) and reader.op != "output")


def _is_view(node: fx.Node) -> bool:
    kind = of(node.target).view if node.op == "call_function" else named(str(node.target)).view
    picked = node.target is operator.getitem and example(node.args[0]) is None
    return (
        _is_view(node.all_input_nodes[0]) if picked else kind not in ("", "same") and spelled(node) not in _MAYBE_ITSELF
    )


def _may_need_gradient(node: fx.Node) -> bool:
    value = example(node)
    if value is None or node.op == "get_attr":
        return node.op != "call_function"
    return value.requires_grad
