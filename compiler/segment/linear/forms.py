"""What a value is of a state that enters linearly: factors times the state, and what is written to it.

The calls of a step that depend on the state are taken apart into ATen operations, one call at a time, so that what a
value is made of is told apart from what it happens to be equal to: an ``autograd.Function`` between two values, whose
gradient is its own, is never stepped over.

Private torch API, tried on 2.11 and 2.13: ``enable_python_dispatcher``, as in ``joint/graph.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from reroll.graph.editing import aten
from reroll.graph.layouts import inverse
from reroll.operations import of
from reroll.segment.linear.axes import Axes, broadcast, is_view, of_view, of_viewed, own

_TIMES = {aten.mul.Tensor, aten.mul.Scalar}
_OVER = {aten.div.Tensor, aten.div.Scalar}
_PLUS = {aten.add.Tensor: 1.0, aten.sub.Tensor: -1.0}
_MATRICES = {aten.bmm.default, aten.mm.default}


@dataclass(frozen=True, slots=True)
class Factor:
    """A value of a step, or a number, that multiplies the state; ``axes``: the dimensions of the state that it has.
    ``inverted``: one over it."""

    source: fx.Node | float
    axes: Axes = ()
    inverted: bool = False

    @property
    def has(self) -> frozenset[int]:
        """The dimensions of the state over which it varies."""
        return frozenset(at for group in self.axes for at in group)

    def value(self, given: Any, sizes: Sequence[int]) -> Any:
        """What the source is in all steps, (T, ...), behind which come all dimensions of the state; those that it lacks
        have one entry. A number stays one."""
        if not isinstance(given, Tensor):
            if not self.inverted:
                return given
            return 1.0 / given if given else math.copysign(math.inf, given)
        order = [at for group in self.axes for at in group]
        found = given.reshape(-1, *(sizes[at] for at in order))
        if order != sorted(order):
            found = found.permute(0, *(1 + at for at in inverse(order)))
        found = found.reshape(-1, *(size if at in order else 1 for at, size in enumerate(sizes)))
        return found.reciprocal() if self.inverted else found


Factors = tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """A value that is the product of ``state`` times the state, plus the product of ``write``, if that is not None;
    summed over dimension ``summed`` of the state, if that is not None. ``axes``: the dimensions that it has."""

    axes: Axes
    state: Factors = ()
    write: Factors | None = None
    summed: int | None = None

    def times(self, factors: Factors) -> Form:
        """The value times factors."""
        return replace(self, state=self.state + factors, write=None if self.write is None else self.write + factors)


@dataclass(slots=True, eq=False)
class Forms:
    """The forms of the values of a step, for one state of ``sizes``; ``values``: fake tensors of all nodes.
    ``of_state``: all nodes that depend on the state, with and without a form."""

    sizes: tuple[int, ...]
    values: Mapping[fx.Node, Any]
    found: dict[fx.Node, Form] = field(default_factory=dict)
    of_state: set[fx.Node] = field(default_factory=set)

    def start(self, state: fx.Node) -> None:
        """The state itself."""
        self.found[state] = Form(own(self.sizes))
        self.of_state.add(state)

    def add(self, call: fx.Node) -> None:
        """Find the form of the result of a call, if it depends on the state, and has one."""
        if self.of_state.isdisjoint(call.all_input_nodes):
            return
        self.of_state.add(call)
        read = (self.found[source] for source in call.all_input_nodes if source in self.found)
        if any(form.summed is not None for form in read):  # what is made of a readout is run as it is written
            return
        form = self._form(call)
        if form is not None:
            self.found[call] = form

    def _form(self, call: fx.Node) -> Form | None:
        parts = decomposed(call, self.values)
        if parts is None:
            return None
        inner = {node: self.found[source] for node, source in parts.inputs.items() if source in self.found}
        for node in parts.graph.nodes:
            if node.op == "call_function" and any(source in inner for source in node.all_input_nodes):
                form = self._of(node, inner, parts)
                if form is None:
                    return None
                inner[node] = form
        return inner.get(parts.result)

    def _of(self, node: fx.Node, inner: Mapping[fx.Node, Form], parts: Parts) -> Form | None:
        """The form of an ATen operation, of those of its operands."""
        first = node.args[0]
        if is_view(node) and isinstance(first, fx.Node):
            axes = of_view(node, inner[first].axes, self.sizes)
            return None if axes is None else replace(inner[first], axes=axes)
        linear = [place for place, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg in inner]
        if len(linear) != 1 or linear[0] > 1 or node.kwargs or inner[node.args[linear[0]]].summed is not None:  # type: ignore[index]
            return None
        rules: dict[Any, Any] = {**dict.fromkeys(_TIMES, self._times), **dict.fromkeys(_OVER, self._over)}
        rules |= {**dict.fromkeys(_PLUS, self._plus), **dict.fromkeys(_MATRICES, self._product)}
        rules[aten.sum.dim_IntList] = self._sum
        form: Form | None = rules[node.target](node, linear[0], inner, parts) if node.target in rules else None
        return form

    def _times(self, node: fx.Node, place: int, inner: Mapping[fx.Node, Form], parts: Parts) -> Form | None:
        form, other = inner[node.args[place]], node.args[1 - place]  # type: ignore[index]
        factors = self._beside(node, node.args[place], other, form.axes, parts)
        return None if factors is None else form.times(factors)

    def _over(self, node: fx.Node, place: int, inner: Mapping[fx.Node, Form], parts: Parts) -> Form | None:
        form, other = inner[node.args[0]] if place == 0 else None, node.args[1]  # type: ignore[index]
        if form is None or len(node.args) != 2:
            return None
        factors = self._beside(node, node.args[0], other, form.axes, parts)
        if factors is None or len(factors) != 1:
            return None
        return form.times((replace(factors[0], inverted=not factors[0].inverted),))

    def _plus(self, node: fx.Node, place: int, inner: Mapping[fx.Node, Form], parts: Parts) -> Form | None:
        form, sign = inner[node.args[place]], _PLUS[node.target]  # type: ignore[index]
        if form.write is not None or len(node.args) != 2:
            return None
        write = self._beside(node, node.args[place], node.args[1 - place], form.axes, parts)
        if write is None:
            return None
        if sign < 0:
            minus = (Factor(-1.0),)
            return replace(form, write=write + minus) if place == 0 else replace(form.times(minus), write=write)
        return replace(form, write=write)

    def _sum(self, node: fx.Node, place: int, inner: Mapping[fx.Node, Form], parts: Parts) -> Form | None:
        form, count = inner[node.args[0]], len(inner[node.args[0]].axes)  # type: ignore[index]
        given: Any = node.args[1]
        if given is None:
            return None
        dims = {at % count for at in given}
        summed = [at for dim in dims for at in form.axes[dim]]
        if len(summed) != 1:
            return None
        keep = len(node.args) > 2 and bool(node.args[2])
        axes = [() if dim in dims else group for dim, group in enumerate(form.axes) if keep or dim not in dims]
        return replace(form, axes=tuple(axes), summed=summed[0])

    def _product(self, node: fx.Node, place: int, inner: Mapping[fx.Node, Form], parts: Parts) -> Form | None:
        """A product of matrices of which the other operand is one row, or one column: a sum of a pointwise product."""
        form, other = inner[node.args[place]], node.args[1 - place]  # type: ignore[index]
        *batch, rows, columns = form.axes
        inner_axes, outer = (columns, rows) if place == 0 else (rows, columns)
        single = -1 if place == 0 else -2  # the dimension of the other operand that has one entry
        if not isinstance(other, fx.Node) or other.meta["val"].shape[single] != 1 or len(inner_axes) != 1:
            return None
        axes = (*batch, inner_axes, ()) if place == 0 else (*batch, (), inner_axes)
        factors = self._factors(other, axes, parts)
        left = (*batch, outer, ()) if place == 0 else (*batch, (), outer)
        return None if factors is None else replace(form.times(factors), axes=left, summed=inner_axes[0])

    def _beside(self, node: fx.Node, linear: Any, other: Any, axes: Axes, parts: Parts) -> Factors | None:
        """The factors of what meets a value with ``axes`` in a pointwise operation that leaves its shape."""
        if not isinstance(other, fx.Node):
            return (Factor(float(other)),) if isinstance(other, int | float) else None
        if node.meta["val"].shape != linear.meta["val"].shape:
            return None
        return self._factors(other, broadcast(other.meta["val"].shape, axes), parts)

    def _factors(self, node: fx.Node, axes: Axes, parts: Parts) -> Factors | None:
        """A value with ``axes`` as a product: of what an outer product is made of, else of the value itself."""
        if node in parts.inputs:
            return self._of_source(parts.inputs[node], axes)
        if is_view(node):
            before = of_viewed(node, axes, self.sizes)
            return None if before is None else self._factors(node.args[0], before, parts)  # type: ignore[arg-type]
        scaled = _scaled(node)
        if scaled is not None:
            inner = self._factors(scaled[0], axes, parts)
            return None if inner is None else (*inner, scaled[1])
        pair = _outer(node, axes)
        if pair is None:
            return None
        found = [self._factors(each, own_axes, parts) for each, own_axes in pair]
        return None if None in found else tuple(factor for each in found for factor in each or ())

    def _of_source(self, source: fx.Node, axes: Axes) -> Factors | None:
        if source in self.of_state:
            return None
        parts = decomposed(source, self.values) if _may_be_outer(source, self.values) else None
        found = self._factors(parts.result, axes, parts) if parts else None
        if found is not None:
            return found
        value = self.values[source]
        return (Factor(source, axes),) if isinstance(value, Tensor) else (Factor(source),)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A call of a step in ATen operations: the placeholders of what it reads, and its result."""

    graph: fx.Graph
    inputs: Mapping[fx.Node, fx.Node]
    result: fx.Node


def decomposed(call: fx.Node, values: Mapping[fx.Node, Any]) -> Parts | None:
    """The ATen operations of one call; None for one that may have a gradient of its own, and of several results."""
    if call.op not in ("call_function", "call_method") or not of(call.target).linear or str(call.target).endswith("_"):
        return None
    sources = [source for source in call.all_input_nodes if isinstance(values[source], Tensor)]
    if not isinstance(values[call], Tensor) or any(values[source] is None for source in call.all_input_nodes):
        return None

    def run(*given: Tensor) -> Any:
        known = dict(zip(sources, given, strict=True))
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda node: known.get(node, values[node]))
        target: Any = getattr(args[0], str(call.target)) if call.op == "call_method" else call.target
        return target(*args[call.op == "call_method" :], **kwargs)

    with enable_python_dispatcher(), torch.no_grad():
        graph = make_fx(run)(*(values[source].detach() for source in sources)).graph
    result: Any = graph.output_node().args[0]
    if not isinstance(result, fx.Node) or result.op != "call_function" or graph.find_nodes(op="get_attr"):
        return None
    return Parts(graph, dict(zip(graph.find_nodes(op="placeholder"), sources, strict=True)), result)


def _may_be_outer(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a value is as large as each of those that it is made of, or larger: an outer product, or a view."""
    value = values[node]
    read = [values[source] for source in node.all_input_nodes if isinstance(values[source], Tensor)]
    return isinstance(value, Tensor) and bool(read) and all(each.numel() <= value.numel() for each in read)


def _scaled(node: fx.Node) -> tuple[fx.Node, Factor] | None:
    """The operand of a product with a number, or a quotient, and that number."""
    if node.target not in _TIMES | _OVER or len(node.args) != 2:
        return None
    value, number = node.args
    if not isinstance(value, fx.Node) or not isinstance(number, int | float):
        return None
    return value, Factor(float(number), inverted=node.target in _OVER)


def _outer(node: fx.Node, axes: Axes) -> list[tuple[fx.Node, Axes]] | None:
    """The two factors of a product of which one is repeated, with the axes that each has; None for other operations."""
    operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
    if len(operands) != 2 or len(node.args) != 2 or node.kwargs:
        return None
    (left, right), count = operands, node.meta["val"].numel()
    if node.target in _TIMES and min(left.meta["val"].numel(), right.meta["val"].numel()) < count:
        return [(each, broadcast(each.meta["val"].shape, axes)) for each in operands]
    if node.target in _MATRICES and left.meta["val"].shape[-1] == 1:
        *batch, rows, columns = axes
        return [(left, (*batch, rows, ())), (right, (*batch, (), columns))]
    return None
