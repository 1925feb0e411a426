"""Names that a user gives to values of a step, for the options ``keep`` and ``recompute``.

``reroll.name`` is the identity. What is captured holds it as the operation ``reroll::label``; once in-place code has
become values the operation goes, and the name stays with the value, in ``meta["named"]`` of its node, so that nothing
that looks for patterns meets it. Where a segment is traced, ``reroll::named`` carries the names into the ATen graph,
and goes there in the same way. Neither is left in what is compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from reroll.errors import UnsupportedError
from reroll.graph.fakes import laid_out_like

LIBRARY = torch.library.Library("reroll", "FRAGMENT")
LIBRARY.define("label(Tensor(a) value, str text) -> Tensor(a)")
LIBRARY.define("named(Tensor value, str text) -> Tensor")


@torch.library.impl(LIBRARY, "label", "CompositeImplicitAutograd")
def _label(value: Tensor, text: str) -> Tensor:
    return value


@torch.library.impl(LIBRARY, "named", "CompositeExplicitAutograd")
def _named(value: Tensor, text: str) -> Tensor:
    return value.clone()


def _batched(info: Any, dims: tuple[Any, ...], value: Tensor, text: str) -> tuple[Tensor, Any]:
    return value, dims[0]


def _like(value: Tensor, text: str) -> Tensor:
    """Laid out exactly as the value, as it takes its place when the operation goes."""
    return laid_out_like(value)


def _identity(_: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


torch.library.register_vmap("reroll::label", _batched, lib=LIBRARY)
torch.library.register_fake("reroll::named", _like, lib=LIBRARY)
torch.library.register_autograd("reroll::named", _identity, lib=LIBRARY)

LABEL, NAMED = torch.ops.reroll.label.default, torch.ops.reroll.named.default


def name(value: Tensor, text: str) -> Tensor:
    """The value itself, which the options ``keep`` and ``recompute`` then know as ``text``.

    It may be called anywhere, costs two microseconds where nothing is compiled, and changes no result. It names the
    value that the tensor has at this moment; in the forward of an ``autograd.Function`` it is not seen. Raises
    UnsupportedError for what is no tensor, or a name that is no text.
    """
    if not isinstance(value, Tensor):
        raise UnsupportedError(f"reroll.name was given {type(value).__name__}, no tensor. Name tensors one by one.")
    if not isinstance(text, str) or not text:
        raise UnsupportedError(f"reroll.name was given {text!r} as a name. Give a text, such as 'hidden'.")
    return LABEL(value, text)  # type: ignore[no-any-return]


def names_of(node: fx.Node) -> tuple[str, ...]:
    """The names that a node's value was given."""
    return tuple(node.meta.get("named", ()))


def add_names(node: fx.Node, texts: tuple[str, ...]) -> None:
    """Note further names of a node's value."""
    if texts:
        node.meta["named"] = tuple(dict.fromkeys((*names_of(node), *texts)))


def take_names(graph: fx.Graph) -> None:
    """Note names at the nodes whose values they are for, and drop the operations that gave them."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (LABEL, NAMED):
            source, text = node.args
            add_names(source, (*names_of(node), text))
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def show_names(step: fx.GraphModule) -> fx.GraphModule:
    """A copy of a step in which an operation gives each named value its names, for a tracer of ATen to see."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in step.graph.find_nodes(op="placeholder"):
        env[node] = graph.node_copy(node)
    for node in step.graph.nodes:
        value = env[node] if node in env else graph.node_copy(node, env.__getitem__)
        for text in names_of(node):
            value = graph.call_function(NAMED, (value, text))
        env[node] = value
    graph.lint()
    return fx.GraphModule(step, graph)
