"""Gradients are added up where they are made, so that hardly any is held beside the sums.

Those of weights that are products are formed where they are added up: ``G += A B`` instead of ``G += (A B)``. A
backward then gives the factors, and the product adds onto the gradients so far, without a result of its own. What is
run node by node hands each gradient over as soon as it is there (``handing_over``), and gives none at its end.

The gradient of a kernel is a product, too, of incoming gradients and windows of the image (Chellapilla, Puri and
Simard 2006). Where the windows hold at most half of what the kernel does, as in the last layers of a network, that is
quicker than torch's convolution, which works in two copies of the kernel (512 to 512 channels of 3 x 3, 8 windows: 1.4
for 9.2 ms; 64: 7.3 for 28).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx

from reroll.graph.editing import aten, call, shape
from reroll.graph.layouts import is_dense
from reroll.graph.memory import origin, storage_nbytes
from reroll.segment.ops import OUTER, OUTER_ADD
from reroll.segment.products import mask_unread, turned

_NORMS = (aten.native_batch_norm_backward, aten.native_layer_norm_backward, aten.native_group_norm_backward)
_SUMS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.sum, aten.embedding_dense_backward)
_FRESH = {aten.convolution_backward, *_NORMS, *_SUMS, aten.add, aten.mul, aten.neg, aten.clone, aten.cat, aten.stack}
"""What always gives memory of its own. Of others that is not sure: ``conj_physical`` of real numbers gives its operand,
and no schema says so."""
_NONE: tuple[list[fx.Node], Any, bool] = ([], None, False)


@dataclass(frozen=True, slots=True)
class Product:
    """A gradient that a backward gives by its factors: where they are among the results.

    It is ``left right``; with ``events`` (crossover, number) ``left^T right`` with many zeros in left. ``turned``: it
    is the transpose of that.
    """

    left: int
    right: int
    events: tuple[float, int] | None = None
    turned: bool = False

    def zeros(self, like: Tensor) -> Tensor:
        """Zeros of the shape of a gradient, in the layout in which adding is fast: by rows for events."""
        if self.events is None:
            return torch.zeros_like(like) if like.dim() == 2 else like.new_zeros(like.shape)
        return like.new_zeros(like.shape[::-1]).t() if self.turned else like.new_zeros(like.shape)

    def add_to(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the product of two factors to the gradients so far."""
        total = total.t() if self.turned else total
        if total.dim() > 2 and not total.is_contiguous():
            total.add_((left @ right).view(total.shape))
        elif self.events is None:
            total.view(len(left), -1).addmm_(left, right) if total.dim() > 2 else total.addmm_(left, right)
        elif not (total.is_contiguous() and OUTER_ADD(total, left, right, *self.events)):
            total.addmm_(left.t(), right)


def defer_products(half: fx.GraphModule, constants: Sequence[bool]) -> Mapping[int, Product]:
    """Let a backward give the factors of its results that are products, instead of these. Gives these by number.

    constants: for each result, whether it is the gradient of a constant. The factors come after all results.
    """
    output = half.graph.output_node()
    given: Any = output.args[0]
    results, found = list(given), dict[int, Product]()
    for number, (result, constant) in enumerate(zip(given, constants, strict=True)):
        factors, events, is_turned = _factors(half.graph, result) if constant and results.count(result) == 1 else _NONE
        if factors:
            results[number] = None
            results += [factor for factor in factors if factor not in results[len(given) :]]
            left, right = (results.index(factor, len(given)) for factor in factors)
            found[number] = Product(left, right, events, is_turned)
    output.args = (tuple(results),)
    half.graph.eliminate_dead_code()
    _sum_biases(half.graph)
    half.recompile()
    return found


class Taker(Protocol):
    """What gradients are handed to while a backward runs."""

    def take(self, number: int, grad: Tensor, own: bool) -> None:
        """A gradient by its number; ``own``: nobody else reads its memory, now or later."""

    def multiply(self, number: int, left: Tensor, right: Tensor) -> None:
        """The factors of a gradient that is the product of that number."""


def _take(taker: Taker, number: int, grad: Tensor, own: bool) -> None:
    taker.take(number, grad, own)


def _multiply(taker: Taker, number: int, left: Tensor, right: Tensor) -> None:
    taker.multiply(number, left, right)


def handed_number(node: fx.Node) -> int | None:
    """The number of the gradient that a node hands to a ``Taker``; -1 for factors."""
    if node.target is _multiply:
        return -1
    return int(node.args[1]) if node.target is _take else None  # type: ignore[arg-type]


def handing_over(half: fx.GraphModule, handed: Sequence[bool], products: Mapping[int, Product]) -> fx.GraphModule:
    """A backward with one more input, the last: a ``Taker``. It is handed the gradients that are ``handed``, each right
    behind the node that makes it, and the factors of ``products``, by their order; there is no such result then.
    """
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(half.graph, env))
    output, own = graph.output_node(), _own_results(graph)
    results: Any = list(output.args[0])  # type: ignore[arg-type]
    order = {node: at for at, node in enumerate(graph.nodes)}
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        order[taker := graph.placeholder("taker")] = len(graph.find_nodes(op="placeholder"))
    for number, product in enumerate(products.values()):
        factors = results[product.left], results[product.right]
        with graph.inserting_after(max(*factors, taker, key=order.__getitem__)):
            graph.call_function(_multiply, (taker, number, *factors))
    for number, grad in enumerate(results[: len(handed)]):
        if handed[number] and grad is not None:
            with graph.inserting_after(max(grad, taker, key=order.__getitem__)):
                graph.call_function(_take, (taker, number, grad, grad in own))
    output.args = ([None if number >= len(handed) or handed[number] else each for number, each in enumerate(results)],)
    return fx.GraphModule(half, graph)


def _own_results(graph: fx.Graph) -> set[fx.Node]:
    """Results that are all of a memory which an operation has made for them, and which nothing reads afterwards."""
    output, order = graph.output_node(), {node: at for at, node in enumerate(graph.nodes)}
    results: Any = output.args[0]
    same = dict[fx.Node, list[fx.Node]]()
    for node in graph.nodes:
        same.setdefault(origin(node), []).append(node)
    found = set()
    for grad in filter(_is_whole, output.all_input_nodes):
        family = same[origin(grad)]
        readers = {user for node in family for user in node.users} - {output}
        alone = [node for node in results if node in family] == [grad]
        if alone and all(order[user] <= order[grad] for user in readers):
            found.add(grad)
    return found


def _is_whole(grad: fx.Node) -> bool:
    """Whether a value is all of a memory that an operation has made for it."""
    made = origin(grad)
    called: Any = made.args[0] if made.target is operator.getitem else made
    if getattr(called.target, "overloadpacket", None) not in _FRESH:
        return False
    value, whole = grad.meta["val"], made.meta["val"]
    return not value.is_complex() and is_dense(value) and storage_nbytes(value) == storage_nbytes(whole)


def _sum_biases(graph: fx.Graph) -> None:
    """Add up the gradients of biases whose kernel's gradient nobody asks for: oneDNN would make that one, too."""
    mask_unread(graph)
    for made in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        grad, mask = cast(Any, made.args[0]), cast(Any, made.args[-1])
        for bias in [user for user in made.users if user.args[1] == 2 and not mask[1]]:
            with graph.inserting_before(bias):
                dims = [dim for dim in range(grad.meta["val"].dim()) if dim != 1]
                bias.replace_all_uses_with(call(graph, aten.sum.dim_IntList, grad, dims))
            graph.erase_node(bias)
    graph.eliminate_dead_code()
    mask_unread(graph)


def _factors(graph: fx.Graph, result: Any) -> tuple[list[fx.Node], Any, bool]:
    """The factors of a product that nothing else reads, however often it is transposed; none of another result.

    And how a product of events is formed, and whether it is transposed then.
    """
    turns = 0
    while isinstance(result, fx.Node) and len(result.users) == 1 and (source := turned(result)) is not None:
        result, turns = source, turns + 1
    if not isinstance(result, fx.Node) or len(result.users) != 1:
        return _NONE
    factors: Any = result.args[:2]
    if result.target is OUTER:
        return list(factors), result.args[2:], turns % 2 == 1
    if result.target is operator.getitem and turns == 0:
        return _windows(graph, result.args[0]) if result.args[1] == 1 else [], None, False
    if result.target is not aten.mm.default:
        return _NONE
    if turns % 2 == 0:
        return list(factors), None, False
    with graph.inserting_before(result):
        return [_turned(graph, factor) for factor in reversed(factors)], None, False


def _turned(graph: fx.Graph, factor: fx.Node) -> fx.Node:
    return turned(factor) or call(graph, aten.permute.default, factor, [1, 0])


def _windows(graph: fx.Graph, made: Any) -> list[fx.Node]:
    """The factors of the gradient of a kernel: incoming gradients, one row a channel, and the windows of the image that
    they come from; nothing where windows are many, or lie apart."""
    if made.target is not aten.convolution_backward.default:
        return []
    grad, image, kernel, _, strides, padding, dilation, transposed, _, groups, _ = made.args
    sizes, channels = shape(kernel), shape(grad)
    if sizes is None or channels is None or transposed or groups != 1 or set(dilation) != {1}:
        return []
    dims = range(2, len(sizes))
    if 2 * math.prod(channels) > channels[1] ** 2 or grad.meta["val"].is_complex():
        return []
    strides, padding = ([*given] * (len(dims) // len(given)) for given in (strides, padding))
    with graph.inserting_before(made):
        if any(padding):
            pads = [each for size in reversed(padding) for each in (size, size)]
            image = call(graph, aten.constant_pad_nd.default, image, pads)
        for dim in dims:
            image = call(graph, aten.unfold.default, image, dim, sizes[dim], strides[dim - 2])
        order = [0, *dims, 1, *(dim + len(dims) for dim in dims)]
        windows = call(graph, aten.permute.default, image, order)
        right = call(graph, aten.reshape.default, windows, [-1, math.prod(sizes[1:])])
        rows = call(graph, aten.permute.default, grad, [1, 0, *dims])
        left = call(graph, aten.reshape.default, rows, [sizes[0], -1])
    return [left, right]
