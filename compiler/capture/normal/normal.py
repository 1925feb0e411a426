"""The normal form in which the repeating step is looked for.

After functionalisation: tensors made of a number of the step are fillings, every integer index is a ``torch.select``
beside its only user, rows that are written one by one into a tensor are one ``torch.stack``, a tensor that grows by
``torch.cat`` is one ``torch.cat``, and nodes that neither have users nor effects are gone; hooks are functions. Common
subexpressions stay: merging them would blur the borders between steps. What is made without gradients is cut off where
it is read with them.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from reroll.capture.normal.functional import functionalise
from reroll.capture.normal.functions import functions_of_values
from reroll.capture.normal.modes import cut_gradients
from reroll.capture.normal.row_writes import collect_cat, collect_rows, forward_read, update_rows
from reroll.capture.normal.selects import open_windows, to_select
from reroll.capture.normal.sequence_operators import show_loops
from reroll.capture.normal.step_tensors import show_numbers
from reroll.graph.editing import drop_dead, name_arguments
from reroll.graph.effects import mark_random
from reroll.graph.lines import take_line
from reroll.graph.names import take_names


def normalise(module: fx.GraphModule, graph: fx.Graph) -> fx.Graph:
    """The normal form of a graph of a module, as a new graph with the same inputs and outputs."""
    new = functionalise(show_loops(functions_of_values(module, graph)))
    name_arguments(new)
    take_names(new)
    show_numbers(new)
    mark_random(module, new)
    drop_dead(new)
    cut_gradients(new)
    for node in list(new.nodes):
        update_rows(new, node)
    open_windows(new)
    for node in list(new.nodes):
        to_select(new, node)
    for node in list(new.nodes):
        forward_read(new, node)
    drop_dead(new)
    for node in reversed(list(new.nodes)):
        collect_rows(new, node)
        collect_cat(new, node)
    _sink_selects(new)
    drop_dead(new)
    _read_all_results(new)
    for node in new.find_nodes(op="get_attr"):  # so that whoever reads one may be moved to any place
        next(iter(new.nodes)).prepend(node)
    new.lint()
    return new


def _read_all_results(graph: fx.Graph) -> None:
    """Where an operation that gives several values is done many times, each of its results is read that is read most
    often: nobody needs the cell of an LSTM's last step, and without it that step would be another one. Functions that
    give as many values count as one operation."""
    calls = defaultdict[Any, list[fx.Node]](list)
    for node in graph.nodes:
        if node.op == "call_function" and node.users and all(map(_is_result, node.users)):
            values = node.meta.get("example_value")
            calls[node.target, len(values) if isinstance(values, tuple | list) else 0].append(node)
    for alike in calls.values():
        read = [tuple(user.args[1] for user in node.users) for node in alike]
        usual, often = Counter(read).most_common(1)[0]
        if 2 * often > len(alike) > 2:
            for node, mine in zip(alike, read, strict=True):
                if mine != usual and set(mine) < set(usual):
                    _read(graph, node, usual)


def _is_result(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)


def _read(graph: fx.Graph, call: fx.Node, numbers: Sequence[Any]) -> None:
    """Read results of a call in this order, right behind it, where somebody read fewer."""
    there = {user.args[1]: user for user in call.users}
    values, before = call.meta.get("example_value"), call
    for number in numbers:
        with graph.inserting_after(before):
            before = graph.call_function(operator.getitem, (call, number))
        before.meta = {} if values is None else {"example_value": values[number]}
        take_line(before, call)
        if (old := there.get(number)) is not None:
            before.meta = dict(old.meta)
            old.replace_all_uses_with(before)
            graph.erase_node(old)


def _sink_selects(graph: fx.Graph) -> None:
    """Every user gets a select of its own, right before it: a step then holds its own slice of time."""
    for node in reversed(list(graph.nodes)):
        if node.target is not torch.select or node.op != "call_function":
            continue
        for user in list(node.users):
            if user.op != "output":
                with graph.inserting_before(user):
                    user.replace_input_with(node, graph.node_copy(node))
        if not node.users:
            graph.erase_node(node)
