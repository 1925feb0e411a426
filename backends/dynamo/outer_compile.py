"""What is around the recurrences: run as it was written, or compiled by inductor where that can pay.

Inductor takes seconds for the smallest graph, and what is around a loop is most often one peeled step. So a piece of
the outer graph (before, between or after recurrences) is compiled only if it makes at least a tenth of the bytes that
the recurrences make. Private torch API, tried on 2.13: ``FakeTensor`` and ``FakeTensorMode`` (its examples).

The operator that Dynamo makes of ``torch.utils.checkpoint`` is meant to be compiled: run as it is, it does not put back
random numbers before it runs its function again, so dropout in it gets wrong gradients (torch 2.11 and 2.13). So
torch's own checkpoint stands in its place where torch runs what Dynamo captured as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from reroll.backends.dynamo.applied import without_classes
from reroll.backends.inductor.whole import compile_whole, refused_by_inductor
from reroll.backends.inductor.wrapper_codegen.unit import quick_builds
from reroll.backends.runtime.undefined_grads import rows
from reroll.errors import UnsupportedError, warn
from reroll.graph.fakes import fake_of, outside_dynamo
from reroll.graph.inplace import operand, updated_places
from reroll.recurrence import Recurrence

WORTHWHILE = 0.1
_MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


def compile_surroundings(outer: fx.GraphModule, recurrences: Sequence[Recurrence]) -> fx.GraphModule:
    """The outer graph, with each piece that is large enough compiled by inductor."""
    names = {recurrence.name for recurrence in recurrences}
    least = WORTHWHILE * sum(recurrence.steps * made_bytes(recurrence.step.graph) for recurrence in recurrences)
    if made_bytes(outer.graph, names) < least or any(_changes_mode(node) for node in outer.graph.nodes):
        return outer
    pieces = _split(outer, names)
    for call in pieces.graph.find_nodes(op="call_module"):
        piece = pieces.get_submodule(str(call.target))
        assert isinstance(piece, fx.GraphModule)
        holds_recurrence = any(node.target in names for node in piece.graph.find_nodes(op="call_module"))
        as_it_is = holds_recurrence or any(node.target is checkpointed for node in piece.graph.nodes)
        if not as_it_is and made_bytes(piece.graph) >= least:
            setattr(pieces, str(call.target), _compiled(piece))
    pieces.recompile()
    return pieces


def made_bytes(graph: fx.Graph, left_out: set[str] | frozenset[str] = frozenset()) -> int:
    """Bytes of all tensors that the calls of a graph make."""
    total = 0
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if node.op.startswith("call") and node.target not in left_out and isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
    return total


def _changes_mode(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") in _MODES


def _split(outer: fx.GraphModule, names: set[str]) -> fx.GraphModule:
    """One submodule per recurrence and per piece between them, in program order.

    What is taken out of several results is taken where they were made: inductor wants tensors as a piece's results.
    """
    numbers: dict[fx.Node, int] = {}
    number = 0
    for node in outer.graph.nodes:
        if node.target is rows or (node.target is operator.getitem and _is_several(node.args[0])):
            numbers[node] = numbers[node.args[0]]
            continue
        is_recurrence = node.op == "call_module" and node.target in names
        number += is_recurrence
        numbers[node] = number
        number += is_recurrence
    split: fx.GraphModule = split_module(outer, nn.Module(), numbers.__getitem__, keep_original_order=True)
    return split


def _is_several(node: fx.Node) -> bool:
    """Whether a call gave several results, not one tensor."""
    return not isinstance(node.meta.get("example_value"), Tensor)


class _Piece(nn.Module):
    """A compiled piece: inductor's callable gives a sequence, the graph around it wants what the piece gave.

    Its backward makes a gradient of every input, of zeros where nothing came in. Plain autograd gives None to an input
    that no used result reads, and optimizers tell the two apart: so does this. ``reaches``: for each result the inputs
    that autograd reaches from it. ``differentiable``: the inputs that it was compiled to give a gradient.
    """

    def __init__(
        self, call: Any, single: bool, reaches: Sequence[frozenset[int]], differentiable: frozenset[int]
    ) -> None:
        super().__init__()
        self.call, self.single, self.reaches, self.differentiable = call, single, reaches, differentiable

    def forward(self, *args: Any) -> Any:
        inputs = {_edge(value): number for number, value in enumerate(args) if _needs(value)}
        if not self.differentiable.issuperset(inputs.values()):
            raise UnsupportedError(
                "A part of the graph around the loop was compiled without a gradient for a value that needs one: what "
                "reroll holds of the graph is wrong. Please report it, with the model; lowering='eager' does without."
            )
        results = self.call(*args)
        self._leave_out(inputs, results)
        return results[0] if self.single else tuple(results)

    def _leave_out(self, inputs: Mapping[Any, int], results: Sequence[Any]) -> None:
        """Let the backward of the piece give None to what the results that came to be used do not reach."""
        ends = {number: value.grad_fn for number, value in enumerate(results) if _needs(value)}
        nodes = {node for node in ends.values() if node is not None and "CompiledFunction" in node.name()}
        everything = frozenset(inputs.values())
        if len(nodes) != 1:
            return
        (node,) = nodes
        given = {results[number].output_nr: self.reaches[number] for number, end in ends.items() if end is node}
        places = [inputs.get(edge) for edge in node.next_functions]

        def leave_out(grads: Sequence[Tensor | None], came: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
            used = (given.get(number, everything) for number, grad in enumerate(came) if grad is not None)
            reached = frozenset[int]().union(*used)
            return tuple(
                grad if place is None or place in reached else None for grad, place in zip(grads, places, strict=True)
            )

        node.register_hook(leave_out)


def _needs(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _edge(value: Tensor) -> tuple[Any, int]:
    edge = torch.autograd.graph.get_gradient_edge(value)
    return edge.node, edge.output_nr


def _reaches(piece: fx.GraphModule, inputs: Sequence[Any]) -> list[frozenset[int]]:
    """For each result of a piece the inputs that autograd reaches from it; the piece is run on fake tensors."""
    edges = {_edge(value): number for number, value in enumerate(inputs) if _needs(value)}
    results = piece(*inputs)
    return [_reached(value, edges) if _needs(value) else frozenset() for value in results]


def _reached(result: Tensor, edges: Mapping[Any, int]) -> frozenset[int]:
    todo = [_edge(result)]
    seen = set(todo)
    while todo:
        node, _ = edge = todo.pop()
        if edge in edges:
            continue
        fresh = {each for each in node.next_functions if each[0] is not None} - seen
        seen |= fresh
        todo += fresh
    return frozenset(edges[edge] for edge in seen if edge in edges)


def _compiled(piece: fx.GraphModule) -> nn.Module:
    inputs = [node.meta.get("example_value") for node in piece.graph.find_nodes(op="placeholder")]
    modes = [value.fake_mode for value in inputs if isinstance(value, FakeTensor)]
    if not modes or any(value is None for value in inputs):
        text = "reroll runs a part of the graph around the loop as it was written: the shape of an input is unknown."
        warn(text)
        return piece
    output = piece.graph.output_node()
    single = isinstance(output.args[0], fx.Node)
    if single:
        output.args = ((output.args[0],),)
        piece.recompile()
    differentiable = frozenset(number for number, value in enumerate(inputs) if _needs(value))
    with outside_dynamo(modes[0]), quick_builds():
        with modes[0]:
            reaches = _reaches(piece, [_distinct(modes[0], value) for value in inputs])
        try:
            with refused_by_inductor("a part of the graph around the loop, which is run as it was written"):
                call = compile_whole(piece, [_distinct(modes[0], value) for value in inputs])
        except UnsupportedError as error:
            warn(str(error))
            call = piece
    return _Piece(call, single, reaches, differentiable)


def _distinct(mode: FakeTensorMode, value: Any) -> Any:
    """A fake of its own: a value and its updated successor share one example, which AOTAutograd takes for one input.

    It is no leaf if the value is none: AOTAutograd cuts off such inputs where no gradient reaches them, as those that
    a module kept of the batch before, whose graph is gone.
    """
    made = fake_of(mode, value)
    if not isinstance(value, torch.Tensor) or value.is_leaf:
        return made
    copy = made.clone()
    return copy if copy.stride() == made.stride() else made.view_as(made)  # what is expanded is copied in full


def checkpointed(function: Any, *args: Any, changed: Sequence[int] = (), **options: Any) -> Any:
    """``function(*args)`` as torch's checkpoint runs it, random numbers put back unless it was asked not to.

    The checkpoint keeps its arguments, and refuses a backward after one was changed. Eager gives it no buffers: what
    the function itself changes (batch norm's statistics, at the places ``changed``) is no argument here either.
    """
    plain = all(type(each) in (Tensor, nn.Parameter) for each in args if isinstance(each, Tensor))
    preserve = plain and options.get("preserve_rng_state", True)  # fakes have no random numbers

    def run(*given: Any) -> Any:
        others = iter(given)
        return function(*(each if number in changed else next(others) for number, each in enumerate(args)))

    given = [each for number, each in enumerate(args) if number not in changed]
    return checkpoint(run, *given, **{**options, "preserve_rng_state": preserve, "use_reentrant": False})


def _changed(graph: fx.Graph) -> tuple[int, ...]:
    """Which arguments a graph changes in place."""
    arguments = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
    updates = (operand(node, place) for node in graph.nodes for place in updated_places(node))
    return tuple(dict.fromkeys(arguments[each] for each in updates if each in arguments))


def run_by_torch(graph: fx.Graph, owner: nn.Module) -> None:
    """Let the checkpoints of a graph that is run as it is keep their random numbers, and its custom functions nothing.

    owner: has their functions.
    """
    without_classes(graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        function = owner.get_submodule(node.args[0].target)
        assert isinstance(function, fx.GraphModule)
        node.target, node.kwargs = checkpointed, {**node.kwargs, "changed": _changed(function.graph)}
