"""Whether torch is as it was installed: what a user put in its place would change a trace, and no text tells what.

Private torch API, tried on 2.11 and 2.13: ``_impls`` of ``torch.library`` (what Python code gave to operators),
``_get_current_dispatch_mode_stack``, ``_get_current_function_mode_stack`` (modes that are on), ``DeviceContext`` (the
mode of ``torch.set_default_device``), ``_decomp``, ``_inductor`` and ``_tensor`` (looked up by name).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from reroll.backends.cache.entries import Unkept

_PYTHON = ("builtins", "typing", "typing_extensions", "copy", "abc", "functools", "types", "contextlib", "collections")
_OWN = {"torch", "reroll", "pybind11_builtins", "_frozen_importlib", "_frozen_importlib_external", "_thread", *_PYTHON}
_PLACES = tuple(f"torch{name}" for name in ("", ".functional", ".nn.functional", "._tensor", ".special", ".linalg"))
_UNCALLED = ("compile", "load", "save")  # by steps; Lightning and others put theirs in the place of some
_TABLES = (("torch._decomp", "decomposition_table"), ("torch._inductor.decomposition", "decompositions"))
_PATTERNS = "torch._inductor.fx_passes.joint_graph"
_KERNELS = ("Meta", "CPU", "CUDA", "MPS", "XPU", "HPU")  # dispatch keys of what computes, which no trace sees
_CACHED = type(functools.cache(lambda: None))


def is_own(value: Any) -> bool:
    """Whether a function, or what holds one, was written by torch, Python or us; what is no function is."""
    if isinstance(value, functools.partial):
        return is_own(value.func)
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return is_own(value.__func__)
    if isinstance(value, property):
        return all(is_own(each) for each in (value.fget, value.fset, value.fdel) if each is not None)
    if isinstance(value, FunctionType):
        return _root(value.__globals__.get("__name__")) in _OWN
    wrapped = getattr(value, "__wrapped__", None) if isinstance(value, _CACHED) else None
    return _root(type(value).__module__) in _OWN and (wrapped is None or is_own(wrapped))


def _root(name: Any) -> str:
    return str(name).partition(".")[0]


def refuse_changed_torch() -> None:
    """Raise Unkept where a function, a rule, a pattern or a mode of torch's is somebody else's."""
    for place, name, value in _attributes():
        if not is_own(value) and name not in _UNCALLED:
            raise Unkept(f"{place}.{name} is not torch's own")
    for name, value in list(vars(torch.Tensor).items()):
        if isinstance(value, MethodDescriptorType) and not name.startswith("__") and value.__name__ != name:
            raise Unkept(f"torch.Tensor.{name} is {value.__name__}")
    for target, rule in _rules():
        if not is_own(rule):
            raise Unkept(f"the decomposition of {target} is not torch's own")
    for name in list(torch.library._impls):
        namespace, _, rest = name.partition("/")
        if namespace == "aten" and rest.rpartition("/")[2] not in _KERNELS:
            raise Unkept(f"{name} is not torch's own")
    _refuse_patterns()
    _refuse_modes()


def _attributes() -> Iterator[tuple[str, str, Any]]:
    """Where functions stand that steps call, with each of them."""
    for place in _PLACES:
        module = sys.modules.get(place)
        if isinstance(module, ModuleType):
            yield from ((place, name, value) for name, value in list(vars(module).items()))
    yield from (("torch.Tensor", name, value) for name, value in list(vars(torch.Tensor).items()))


def _rules() -> Iterator[tuple[Any, Any]]:
    for module, name in _TABLES:
        yield from list(getattr(sys.modules.get(module), name, {}).items())


def _refuse_patterns() -> None:
    """Raise Unkept where a pattern that inductor looks for in joint graphs was added by a user."""
    passes = getattr(sys.modules.get(_PATTERNS), "patterns", None)
    for entries in list(getattr(passes, "patterns", {}).values()):
        for entry in list(entries):
            if not is_own(getattr(entry, "handler", None)) or not is_own(getattr(entry, "extra_check", None)):
                raise Unkept("a pattern of inductor's joint graphs is not torch's own")


def _refuse_modes() -> None:
    modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
    strange = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if strange:
        raise Unkept(f"{strange[0]} is on")
