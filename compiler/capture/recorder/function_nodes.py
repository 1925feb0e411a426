"""Functions that stand in a recorded graph for what a model does in a way that a graph has no word for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from reroll.capture.recorder.spelling import METADATA, spelled
from reroll.graph.fakes import Fakes
from reroll.graph.nested import with_leaves

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


def filled(size: Any, fill_value: Tensor, **options: Any) -> Tensor:
    """``torch.full`` with a value that is a tensor, which Python does not read."""
    kind: type = bool if fill_value.dtype == torch.bool else float if fill_value.is_floating_point() else int
    return torch.full(size, kind(), **options).copy_(fill_value.detach())


def fresh_leaf(value: Tensor) -> Tensor:
    """The value as a leaf of autograd's that needs a gradient, in the same memory."""
    return value.detach().requires_grad_()


class Forward:
    """The operations of the forward of an ``autograd.Function``, as they run, for what is asked about its result.

    What it gives otherwise than by operations on its operands, an input of its own stands for. Operations that give no
    tensor (an assignment to a part, several tensors, one updated by an operator of the user's) are not told: ``whole``
    says whether there was none.
    """

    def __init__(self, operands: Sequence[Any], fakes: Fakes) -> None:
        self.graph, self.whole, self.fakes = fx.Graph(), True, fakes
        self._known = dict[int, tuple[Tensor, fx.Node]]()
        for each in operands:
            self._node(each)

    def note(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """One operation and what it gives."""
        if function in METADATA:
            return
        call = spelled(function, tuple(args), dict(kwargs))
        if call is None or not isinstance(result, Tensor):
            self.whole = False
            return
        node = self.graph.create_node(call.op, call.target, *with_leaves(self._node, (call.args, call.kwargs)))
        node.meta["example_value"] = self.fakes(result.detach())
        self._known[id(result)] = result, node

    def ended(self, result: Any) -> fx.Graph | None:
        """The graph whose result that of the forward is; None where an operation is missing in it."""
        if not self.whole:
            return None
        self.graph.output(with_leaves(self._node, result))
        return self.graph

    def _node(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value if isinstance(value, _PLAIN) else None
        if id(value) not in self._known:
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                self._known[id(value)] = value, self.graph.placeholder(f"operand_{len(self._known)}")
        return self._known[id(value)][1]


def application(function: Any, objects: Mapping[int, Any]) -> Callable[..., Any]:
    """A function that applies an ``autograd.Function``, with these objects among its operands, by place."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        rest = iter(args)
        count = len(args) + len(objects)
        return function.apply(*(objects[n] if n in objects else next(rest) for n in range(count)), **kwargs)

    apply.reroll_application = function  # type: ignore[attr-defined]
    apply.__name__ = apply.__qualname__ = f"{function.__name__}_apply"
    return apply


def is_application(target: Any) -> bool:
    """Whether a node's target applies an ``autograd.Function`` as a whole."""
    return hasattr(target, "reroll_application")
