"""What a node does besides giving a value: random numbers, effects, gradients, and the modes that it runs in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from reroll.graph.inplace import out_of_place
from reroll.graph.private import (
    autocast_dtypes,
    is_higher_order,
    is_of_users,
    is_operator,
    is_seeded,
    set_grad_enabled,
)
from reroll.operations import Operation, named, of

_EFFECTS = (
    *("copy_", "_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_assert_async", "set_stream"),
    *("skipped_runs", "run_ended"),
)
_TRANSFORMS = ("torch._functorch", "torch._C._functorch")
_TORCH = ("torch", "_operator", "operator", "builtins", "math")
_USERS = re.compile(r"ops\.(?!aten\.)")  # as `inplace.spell` writes operators of others
_OWN_GRADIENTS = ("autograd_function_apply", "register_hook")
_ENTER, _EXIT = ("_enter_autocast", "_enter_inference_mode"), ("_exit_autocast", "_exit_inference_mode")
Mode = tuple[bool, tuple[tuple[str, tuple[object, ...]], ...]]


def spelled(node: fx.Node) -> str:
    """The name of what a node calls."""
    if node.op == "call_function" and node.target is out_of_place:
        return str(node.args[0]).rpartition(":")[2]
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def operation(node: fx.Node) -> Operation:
    """What is known of what a node calls; an update in place is what it is of a copy."""
    if node.op not in ("call_function", "call_method"):
        return named("")
    if node.target is not out_of_place:
        return of(node.target)
    path = str(node.args[0]).rpartition(":")[2]
    return named(path.removeprefix("ops.aten.").partition(".")[0] if path.startswith("ops.aten.") else path)


def mark_random(module: torch.nn.Module, graph: fx.Graph) -> bool:
    """Note at each node whether it draws random numbers, itself or in a submodule; whether any does."""
    for node in graph.nodes:
        node.meta["random"] = _draws(module, node)
    return any(node.meta["random"] for node in graph.nodes)


def draws(name: str) -> bool:
    """Whether an operation of this name draws random numbers."""
    return named(name).random


def _draws(module: torch.nn.Module, node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    if node.op == "call_module":
        return True
    name = spelled(node).split(".")[0]
    if _switched_off(node, name) or (named(name).dropout and _rate(node) in (0, 1)):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return is_seeded(node)
    if draws(name):
        return True
    inner = [attribute(module, leaf) for leaf in node.all_input_nodes if leaf.op == "get_attr"]
    return any(mark_random(each, each.graph) for each in inner if isinstance(each, fx.GraphModule))


def gives_operand(node: fx.Node) -> bool:
    """Whether a node is a dropout that drops nothing: in eager it gives its operand itself, which fake tensors do not
    tell, as torch makes those in another way."""
    name = spelled(node).split(".")[0]
    if node.op not in ("call_function", "call_method") or not named(name).dropout:
        return False
    return _switched_off(node, name) or _rate(node) == 0


def _rate(node: fx.Node) -> Any:
    """What share a dropout drops."""
    operands = node.args[3:] if node.target is out_of_place else node.args
    return operands[1] if len(operands) > 1 else node.kwargs.get("p", 0.5)


def _switched_off(node: fx.Node, name: str) -> bool:
    """Whether a dropout is not training, or an attention has none, so that it draws nothing."""
    operands = node.args[3:] if node.target is out_of_place else node.args
    if named(name).dropout:
        return (operands[2] if len(operands) > 2 else node.kwargs.get("training", True)) is False
    rate = operands[4] if len(operands) > 4 else node.kwargs.get("dropout_p", 0.0)
    return name == "scaled_dot_product_attention" and isinstance(rate, int | float) and rate in (0, 1)


def attribute(module: torch.nn.Module, node: fx.Node) -> Any:
    """The object that a get_attr node names."""
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def is_random(node: fx.Node) -> bool:
    """Whether a node of a normal form draws random numbers."""
    return bool(node.meta.get("random", False))


def has_effect(node: fx.Node) -> bool:
    """Whether a node does more than give a value, so that it stays even if nobody uses it."""
    if node.op in ("placeholder", "output", "call_module") or is_random(node):
        return True
    if node.op == "get_attr" or node.target is out_of_place:
        return False
    return spelled(node) in (*_EFFECTS, *_ENTER, *_EXIT) or in_transform(node)


def is_torchs(node: fx.Node, module: torch.nn.Module | None = None) -> bool:
    """Whether what a node does is torch's own: its name says what that is, and its gradient is linear in the one that
    comes in.

    A function with a gradient of its own (``autograd.Function``), an operator of ``torch.library`` or a hook may clip
    its gradient, or add to it. So what is not torch's own is neither done once in place of several times, nor for rows
    of several steps at once, nor where eager leaves it out. module: that of the graph; without it an operator that runs
    functions is taken for none of torch's own.
    """
    target: Any = node.target
    if node.op != "call_function":
        return True
    if is_higher_order(target):
        found = [attribute(module, each) for each in node.all_input_nodes if module and each.op == "get_attr"]
        bodies = [each for each in found if isinstance(each, fx.GraphModule)]
        inner = all(is_torchs(each, body) for body in bodies for each in body.graph.nodes)
        return bool(bodies) and inner and target.name() not in _OWN_GRADIENTS
    if is_operator(target):
        return not is_of_users(target)
    if target is out_of_place:
        kind, place, *name = str(node.args[0]).split(":")
        return kind == "method" or (_is_place_of_torchs(place) and not _USERS.match(name[0]))
    return _is_place_of_torchs(getattr(target, "__module__", None) or "torch")


def _is_place_of_torchs(module: str) -> bool:
    return module.partition(".")[0] in _TORCH


def gradient_sources(
    node: fx.Node, inputs: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes
) -> set[fx.Node]:
    """A value, and all values to which its gradient flows: what it depends on, but by whole numbers, comparisons and
    what is cut off. ``inputs``: what a node is computed from."""
    found, todo = set[fx.Node](), [node]
    while todo:
        each = todo.pop()
        if each not in found and _differentiable(each):
            found.add(each)
            todo += inputs(each)
    return found


def _differentiable(node: fx.Node) -> bool:
    value = example(node)
    kinds = value is None or value.dtype.is_floating_point or value.dtype.is_complex
    return kinds and named(spelled(node)).name != "detach"


def in_transform(node: fx.Node) -> bool:
    """Whether a node is part of a ``torch.func`` transform inside of the graph: it acts on an interpreter stack."""
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and module.startswith(_TRANSFORMS)


def modes(nodes: list[fx.Node]) -> list[Mode]:
    """Before each node and after the last: whether gradients are on, and the autocast and inference regions open."""
    grad, opened = True, dict[fx.Node, tuple[str, tuple[object, ...]]]()
    found: list[Mode] = [(grad, ())]
    for node in nodes:
        name = spelled(node)
        if node.target is set_grad_enabled:
            grad = bool(node.args[0])
        elif name in _ENTER:
            opened[node] = (name, tuple(node.args))
        elif name in _EXIT:
            opened.pop(node.args[0], None)  # type: ignore[arg-type]
        changed = node.target is set_grad_enabled or name in _ENTER or name in _EXIT
        found.append((grad, tuple(opened.values())) if changed else found[-1])
    return found


def grad_enabled(mode: Mode) -> bool:
    """Whether gradients are on."""
    return mode[0] and not any(region == "_enter_inference_mode" for region, _ in mode[1])


def autocasts(mode: Mode) -> tuple[tuple[object, ...], ...]:
    """The arguments of the autocast regions that are open, the outermost first: those that are on around the graph, as
    it is compiled for them, then those of the graph."""
    around = [(kind, dtype, True, torch.is_autocast_cache_enabled()) for kind, dtype in autocast_dtypes() if dtype]
    return (*around, *(arguments for region, arguments in mode[1] if region == "_enter_autocast"))


def example(node: Any) -> torch.Tensor | None:
    """The example tensor of a node, if it has one."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


SHARD = "_reroll_shard_of_"
"""Begins the attribute of a module that holds its rows of a parameter which lies in parts in several processes."""


def is_weight(node: fx.Node) -> bool:
    """Whether an input of a graph is a parameter of the model, or this process's part of one."""
    return isinstance(example(node), torch.nn.Parameter) or (node.op == "placeholder" and SHARD in node.name)
