"""A text of a step that is the same in every process where the step is the same, and in none where it is not.

Private torch API, tried on 2.11 and 2.13: ``_get_qualified_name`` of ``torch.fx.node``, ``OpOverload``,
``OpOverloadPacket`` and ``HigherOrderOperator`` of ``torch._ops``, ``FakeTensor``.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import _get_qualified_name

from reroll.backends.cache.entries import Unkept
from reroll.backends.cache.patches import is_own
from reroll.graph.effects import attribute
from reroll.graph.inplace import resolved
from reroll.graph.private import is_of_users

_PLAIN = (
    *(type(None), type(...), bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_ROOTS = ("torch", "_operator", "operator", "builtins", "math", "reroll")
_HIGHER = ("autograd_function_apply", "tag_activation_checkpoint", "cond")  # whose operands say all that they do
_TENSORS = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_SPELLED = "function:"
_SMALL = 256  # elements of a tensor that is spelled out


def step_text(step: fx.GraphModule) -> str:
    """What a step does, line by line. Raises Unkept for what only this process knows."""
    names: dict[fx.Node, str] = {}
    lines = []
    for place, node in enumerate(step.graph.nodes):
        names[node] = f"%{place}"
        lines.append(f"%{place} {node.op} {_called(step, node)} {_text((node.args, node.kwargs), names)}")
    return "(" + "\n".join(lines) + ")"


def _called(step: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_function":
        return _function(node.target)
    if node.op in ("get_attr", "call_module"):
        return _attribute(attribute(step, node))
    return str(node.target) if node.op == "call_method" else ""


def _function(target: Any) -> str:
    """The name of an operator or function of torch's, Python's or ours, which it is found under."""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        refuse_users_operator(target)
        return f"operator {target}"
    if isinstance(target, HigherOrderOperator):
        if target.name() not in _HIGHER:
            raise Unkept(f"the operands of {target.name()} do not say all that it does")
        return f"higher {target.name()}"
    name = _qualified(target)
    module, _, last = name.rpartition(".")
    if name.partition(".")[0] not in _ROOTS or _found(module or "builtins", last) is not target or not is_own(target):
        raise Unkept(f"{name} is a function of the user's")
    return f"function {name}"


def refuse_users_operator(target: Any) -> None:
    """Raise Unkept for an operator of ``torch.ops`` that is a user's, or to which Python code gave a kernel."""
    if is_of_users(target):
        raise Unkept(f"{target} is an operator of the user's")
    if not all(is_own(kernel) for kernel in getattr(target, "py_kernels", {}).values()):
        raise Unkept(f"a kernel of {target} is the user's")


def _qualified(target: Any) -> str:
    try:
        return _get_qualified_name(target)
    except (RuntimeError, AttributeError) as error:
        raise Unkept(f"{target!r} has no name") from error


def _found(module: str, name: str) -> Any:
    """What a name of a module stands for, which may be a class (``torch.Tensor.add``)."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        outer, _, inner = module.rpartition(".")
        return getattr(_found(outer, inner), name, None) if outer else None


def _attribute(value: Any) -> str:
    """What a step holds: the text of a graph, or a small tensor to the last bit."""
    if isinstance(value, fx.GraphModule):
        return step_text(value)
    plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type in ("cpu", "cuda")
    if not plain or value.numel() > _SMALL or value.is_conj() or value.is_neg():
        raise Unkept(f"a step holds {type(value).__name__}")
    entries = value.detach().cpu().contiguous().flatten().view(torch.uint8) if value.numel() else value
    return repr((tensor_text(value), entries.tolist()))


def tensor_text(value: torch.Tensor) -> str:
    """All that a tensor is but its values. Raises Unkept for kinds of tensors of the user's."""
    if value.layout is not torch.strided or type(value) not in _TENSORS:
        raise Unkept(f"{type(value).__name__} is no plain tensor")
    sizes = (tuple(value.shape), value.stride(), value.storage_offset())
    return repr((*sizes, value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg()))


def _spelled(name: str) -> Any:
    """What updates in place call, which they have as a text (``graph.inplace.spell``)."""
    try:
        return resolved(name)
    except (AttributeError, ImportError, ValueError) as error:
        raise Unkept(f"{name} is not found") from error


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    """An operand. Raises Unkept for an object whose text does not say all of it."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        return f"{'(' if isinstance(value, tuple) else '['}{', '.join(_text(each, names) for each in value)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key, names)}: {_text(item, names)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), names)}"
    if isinstance(value, str) and value.startswith(_SPELLED):
        _function(_spelled(value.removeprefix(_SPELLED)))
    if type(value) not in _PLAIN:
        raise Unkept(f"an operand is {type(value).__name__}")
    return repr(value)
