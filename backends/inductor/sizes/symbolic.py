"""A graph with symbols in place of the numbers that change.

Private torch API, tried on 2.11 and 2.13: ``ShapeEnv`` with ``create_symbol``, ``create_symintnode`` and ``DimDynamic``
(symbols), ``ConstantSource`` (a name for each), ``FakeTensorMode`` (fake tensors of such sizes),
``enable_python_dispatcher`` (operations whose formula in C++ takes no symbols have one in Python).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from reroll.backends.inductor.sizes.fit import Fit, Form, Ratio
from reroll.backends.inductor.sizes.numbers import Numbers, is_number
from reroll.graph.private import map_aggregate

PREFIX = "reroll_size_"


@dataclass(frozen=True, slots=True, eq=False)
class Symbolic:
    """A graph whose first operands are its sizes, with what torch knows of these."""

    graph: fx.GraphModule
    mode: FakeTensorMode
    environment: ShapeEnv
    symbols: tuple[torch.SymInt, ...]

    def assumed(self) -> Callable[[Sequence[int]], bool]:
        """What was assumed of the sizes so far, as a function of them. Raises ValueError if one of them is fixed."""
        if any(not symbol.node.expr.free_symbols for symbol in self.symbols):
            raise ValueError("an operation takes one size alone")
        text = self.environment.produce_guards_expression(list(self.symbols))
        if text is None:
            return lambda _: True
        return lambda sizes: bool(self.environment.evaluate_guards_expression(text, list(sizes)))


def symbolic(graph: fx.Graph, fit: Fit, numbers: Numbers) -> Symbolic:
    """A graph in which numbers are their forms of symbols. Raises what torch raises where it cannot follow them."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    symbols = tuple(_symbol(environment, f"{PREFIX}{at}", size) for at, size in enumerate(fit.sizes(numbers)))
    writer = _Writer(symbols, mode, iter(fit.forms))
    for node in graph.nodes:
        writer.write(node)
    return Symbolic(fx.GraphModule({}, writer.graph), mode, environment, symbols)


def _symbol(environment: ShapeEnv, name: str, size: int) -> Any:
    source = ConstantSource(name)
    symbol = environment.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return environment.create_symintnode(symbol, hint=size, source=source)


@dataclass(slots=True)
class _Writer:
    """Copies nodes, the forms of whose numbers come in order."""

    symbols: Sequence[Any]
    mode: FakeTensorMode
    forms: Iterator[Form | Ratio]
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    numbers: dict[Form | Ratio, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for at, symbol in enumerate(self.symbols):
            node = self.graph.placeholder(f"{PREFIX}{at}")
            node.meta["val"], self.numbers[Form((at,), 1, 0)] = symbol, node

    def write(self, node: fx.Node) -> None:
        """Copy a node, with what it gives."""
        copy = self._operand(node) if node.op == "placeholder" else self._copy(node)
        copy.meta |= {name: value for name, value in node.meta.items() if name != "val"}
        self.copies[node] = copy

    def _operand(self, node: fx.Node) -> fx.Node:
        like = node.meta["val"]
        size, stride = ([self._value(next(self.forms)) for _ in range(like.dim())] for _ in range(2))
        copy = self.graph.placeholder(node.name)
        with self.mode:
            copy.meta["val"] = torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
        return copy

    def _copy(self, node: fx.Node) -> fx.Node:
        args, kwargs = map_aggregate(node.args, self._argument), map_aggregate(node.kwargs, self._argument)
        copy = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        if node.op == "call_function":
            self._give(copy)
        return copy

    def _give(self, node: fx.Node) -> None:
        target: Any = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with enable_python_dispatcher(), self.mode, torch.no_grad():
            node.meta["val"] = target(*args, **kwargs)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.copies[value]
        return self._number(next(self.forms)) if is_number(value) else value

    def _value(self, form: Form | Ratio) -> Any:
        number = self._number(form)
        return number.meta["val"] if isinstance(number, fx.Node) else number

    def _number(self, form: Form | Ratio) -> fx.Node | int | float:
        """A number, or the node that gives it."""
        if isinstance(form, Form) and not form.of:
            return form.offset
        if form not in self.numbers:
            self.numbers[form] = self._ratio(form) if isinstance(form, Ratio) else self._multiple(form)
        return self.numbers[form]

    def _ratio(self, ratio: Ratio) -> fx.Node:
        return self._arithmetic(operator.truediv, self._number(ratio.above), self._number(ratio.below))

    def _multiple(self, form: Form) -> fx.Node:
        node = self.numbers[Form(form.of[:1], 1, 0)]
        for at in form.of[1:]:
            node = self._arithmetic(operator.mul, node, self.numbers[Form((at,), 1, 0)])
        node = node if form.factor == 1 else self._arithmetic(operator.mul, node, form.factor)
        node = node if form.offset == 0 else self._arithmetic(operator.add, node, form.offset)
        node = node if form.divisor == 1 else self._arithmetic(operator.floordiv, node, form.divisor)
        return node if form.times == 1 else self._arithmetic(operator.mul, node, form.times)

    def _arithmetic(self, operation: Callable[..., Any], *operands: fx.Node | int | float) -> fx.Node:
        node = self.graph.call_function(operation, operands)
        node.meta["val"] = operation(*(each.meta["val"] if isinstance(each, fx.Node) else each for each in operands))
        return node
