"""Functions with gradients of their own in a form that rests on values alone, not on which tensor is which.

A hook becomes a function through which its value goes, whose backward the hook is. Dynamo writes
``Tensor.register_hook`` of a value that the graph makes as an operator that returns its operand (from torch 2.13 on).
Eager calls a hook with the sum of all gradients of its tensor, whoever read that before or after: so everybody reads
the function's result. Of several hooks the first one comes first.

A function that updates an operand (``ctx.mark_dirty``) updates a copy, which is its result.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from reroll.errors import CaptureError
from reroll.graph.effects import attribute, example
from reroll.graph.inplace import operand as operand_at
from reroll.graph.inplace import storage_of, updated_places
from reroll.graph.lines import take_line, where
from reroll.graph.private import is_higher_order, set_grad_enabled

_APPLY = torch.ops.higher_order.autograd_function_apply


def functions_of_values(module: fx.GraphModule, graph: fx.Graph) -> fx.Graph:
    """The graph with a function for each hook, and without functions that update operands; itself where there are
    none. The module gets what these functions run. Raises CaptureError."""
    if not any(_is_hook(node) or _is_dirty(node) for node in graph.nodes):
        return graph
    new, sources = fx.Graph(), dict[fx.Node, fx.Node]()
    new.output(new.graph_copy(graph, {}))
    for function in [node for node in new.nodes if _is_dirty(node)]:
        _update_copies(module, function)
    for hook in [node for node in new.nodes if _is_hook(node)]:
        value: Any = hook.args[0]
        hook.replace_all_uses_with(value)
        source = sources.get(value, value)
        made = _applied(module, hook, source)
        sources.setdefault(value if source is not value else made, source)
        new.erase_node(hook)
    new.lint()
    return new


def _is_dirty(node: fx.Node) -> bool:
    return node.target is _APPLY and bool(node.kwargs.get("dirty_idx"))


def _update_copies(module: fx.GraphModule, function: fx.Node) -> None:
    """Have a function update copies of its operands. Raises CaptureError where another value shows the update."""
    name, backward, *operands = function.args
    assert isinstance(name, fx.Node)
    body = fx.GraphModule(attribute(module, name), fx.Graph())
    body.graph.output(body.graph.graph_copy(attribute(module, name).graph, {}))
    results: Any = body.graph.output_node().args[0][0]  # type: ignore[index]
    marks: Any = function.kwargs["dirty_idx"]
    dirty, inputs = [results[number] for number in marks], body.graph.find_nodes(op="placeholder")
    memory = {storage_of(each) for each in dirty} - {None}
    for inner, operand in zip(inputs, operands, strict=True):
        if inner in dirty or storage_of(inner) in memory:
            _refuse_shown(function, operand)
            readers = list(inner.users)
            with body.graph.inserting_after(inputs[-1]):
                copy = body.graph.call_method("clone", (inner,))
            for reader in readers:
                reader.replace_input_with(inner, copy)
    path = f"{name.target}_on_copies"
    setattr(module, path, body)
    with function.graph.inserting_before(function):
        function.args = (function.graph.get_attr(path), backward, *operands)
    function.kwargs = {key: value for key, value in function.kwargs.items() if key != "dirty_idx"}
    for pick in (user for user in function.users if user.args[1] in marks):
        value = pick.meta["example_value"]
        pick.meta["example_value"] = value.detach().clone().requires_grad_(value.requires_grad)


def _refuse_shown(function: fx.Node, updated: Any) -> None:
    order = {node: at for at, node in enumerate(function.graph.nodes)}
    memory = storage_of(updated)
    others = [node for node in order if storage_of(node) == memory and node not in function.users]
    shown = any(order[user] > order[function] for node in others for user in node.users)
    if shown or any(node.op == "placeholder" for node in others):
        raise CaptureError(
            f"{where(function)}: a function updates a tensor in place (ctx.mark_dirty) that is read elsewhere, too, or "
            "comes from outside of the model. Give it a clone()."
        )


def _is_hook(node: fx.Node) -> bool:
    return is_higher_order(node.target) and node.target.name() == "register_hook"  # type: ignore[union-attr]


def _applied(module: fx.GraphModule, hook: fx.Node, source: fx.Node) -> fx.Node:
    """What all readers of a value read in its place: the result of the function that a hook on it is."""
    graph, (_, body, *read) = hook.graph, hook.args
    assert isinstance(body, fx.Node)
    readers = [user for user in source.users if user is not hook]
    late = any(isinstance(each, fx.Node) and each.op != "placeholder" for each in read)
    _refuse(hook, source, readers if late else [])
    names = [f"{body.target}_{kind}" for kind in ("forward", "backward")]
    for name, each in zip(names, _bodies(attribute(module, body), len(read)), strict=True):
        setattr(module, name, each)
    marks: Any = {
        "non_differentiable_idx": [],
        "saved_for_backward_idx": [at for at, each in enumerate(read) if _is_tensor(each)],
    }
    front = graph.find_nodes(op="placeholder")[-1].next if source.op == "placeholder" else source.next
    with graph.inserting_before(hook if late else front):
        applied = graph.call_function(_APPLY, (*map(graph.get_attr, names), source, *read), marks)
        made = graph.call_function(operator.getitem, (applied, 0))
    made.meta["example_value"] = source.meta["example_value"]
    applied.meta["example_value"] = (made.meta["example_value"],)
    for node in (applied, made):
        take_line(node, hook)
    for reader in readers:
        reader.replace_input_with(source, made)
    return made


def _is_tensor(read: Any) -> bool:
    """Whether what a hook reads is a tensor; sizes are numbers."""
    return isinstance(read, fx.Node) and example(read) is not None


def _refuse(hook: fx.Node, source: fx.Node, before: Sequence[fx.Node]) -> None:
    """Raise CaptureError for a hook on what is updated in place, or that reads more than its gradient, where nodes
    ``before`` it read the value already."""
    order = {node: at for at, node in enumerate(hook.graph.nodes)}
    updating = (node for node in order if order[node] > order[source] and updated_places(node))
    memory = storage_of(source)
    if any(storage_of(operand_at(node, place)) == memory for node in updating for place in updated_places(node)):
        raise CaptureError(f"{where(hook)}: a hook is on a value that is updated in place. Update it out of place.")
    if any(order[node] < order[hook] for node in before):
        raise CaptureError(
            f"{where(hook)}: a hook that reads other tensors is on a value that was read before. Register it right "
            "behind the line that makes the value."
        )


def _bodies(body: fx.GraphModule, read: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What a function runs in its forward and its backward that gives a value as it is, and its gradient as the body
    of a hook gives it, which reads so many other tensors."""
    forward, backward = fx.Graph(), fx.Graph()
    value, *saved = (forward.placeholder(f"value_{number}") for number in range(read + 1))
    with _without_gradients(forward):
        made = forward.call_method("view_as", (value, value))
    forward.output(((made,), tuple(saved)))
    given = [backward.placeholder(f"gradient_{number}") for number in range(read + 1)]
    with _without_gradients(backward):
        inputs = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
        result = backward.graph_copy(body.graph, inputs)
    backward.output((given[0] if result is None else result, *[None] * read))
    return fx.GraphModule(body, forward), fx.GraphModule(body, backward)


@contextmanager
def _without_gradients(graph: fx.Graph) -> Iterator[None]:
    graph.call_function(set_grad_enabled, (False,))
    yield
    graph.call_function(set_grad_enabled, (True,))
