"""When two functions, or two objects, are the same for a model: to tell one run's operations from another's."""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

import torch

PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
"""Types of values that hold nothing else, and are the same if they are written the same."""
_WRITTEN = (str, bytes, int, float, complex)  # bool has no subclasses
_OF_OBJECTS = frozenset(
    {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME", "IMPORT_FROM"}
)
"""Instructions whose name is that of an attribute, or of a module."""
_METHODS = ("forward", "backward", "setup_context", "vjp", "jvp", "vmap")


def is_a(value: Any, kinds: Any) -> bool:
    """Whether an object is of a class by its type: a proxy or mock may claim another ``__class__``, or raise there."""
    return issubclass(type(value), kinds)


def text_of(value: Any) -> str:
    """A number or a text as its own kind writes it, with the name of a class that is made from that: what such a class
    writes may be the same for other values."""
    if type(value) in PLAIN:
        return repr(value)
    kind: Any = next((each for each in _WRITTEN if is_a(value, each)), None)
    if kind is None:
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}({kind.__repr__(value)})"


class Same:
    """One object, equal to nothing else; it is kept alive, so that no other object gets its identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def content_of(cell: types.CellType) -> tuple[Any, ...]:
    """What a variable of a closure holds, or nothing."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # an empty cell
        return ()


@functools.lru_cache(maxsize=1 << 14)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals that code loads or assigns, itself or in functions that it defines; none of attributes."""
    inner = (global_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    own = (each.argval for each in dis.get_instructions(code) if _names_a_global(each))
    return tuple(dict.fromkeys((*own, *(name for names in inner for name in names))))


def _names_a_global(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasname and instruction.opname not in _OF_OBJECTS


def fingerprint(value: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Equal for functions, and for ``autograd.Function`` classes, of the same code over the same values.

    A class or function that is made anew in every call is so known again; other objects are known by identity. inside:
    the functions and classes that lead to this one.
    """
    if any(value is each for each in inside):
        return "itself"
    if isinstance(value, types.FunctionType):
        inner = (*inside, value)
        cells = [tuple(fingerprint(each, inner) for each in content_of(cell)) for cell in value.__closure__ or ()]
        named = value.__defaults__, tuple((value.__kwdefaults__ or {}).items())
        defaults = fingerprint(named, inner) if named != (None, ()) else None
        return value.__code__, defaults, tuple(cells), Same(value.__globals__), _numbers_read(value)
    if isinstance(value, PLAIN):
        return type(value), text_of(value)
    if isinstance(value, tuple):
        return tuple([fingerprint(each, inside) for each in value])
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        methods = tuple([fingerprint(each, (*inside, value)) for each in _own_methods(value)])
        plain = tuple((k, text_of(v)) for k, v in vars(value).items() if k[:2] != "__" and isinstance(v, PLAIN))
        return methods, plain
    return Same(value)


def by_value(value: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Equal for objects of one class whose attributes are the same functions, numbers, texts and such objects."""
    if any(value is each for each in inside):
        return "itself"
    if isinstance(value, list | tuple | dict | set):
        items = value.items() if isinstance(value, dict) else value
        return type(value), tuple(by_value(each, (*inside, value)) for each in items)
    if not isinstance(getattr(value, "__dict__", None), dict) or isinstance(value, (type, types.FunctionType)):
        return fingerprint(value)
    items = sorted(vars(value).items())
    return type(value), tuple((name, by_value(each, (*inside, value))) for name, each in items)


def may_change_unseen(value: Any) -> bool:
    """Whether an object may hold more than ``by_value`` compares: attributes in slots, or what is not Python's own."""
    own = isinstance(value, (*PLAIN, type, types.FunctionType, list, tuple, dict, set))
    return not own and not isinstance(getattr(value, "__dict__", None), dict)


def holds_tensors(value: Any, inside: tuple[Any, ...] = ()) -> bool:
    """Whether a tensor can be reached from an object: by attributes, items, or variables of a function."""
    if isinstance(value, torch.Tensor):
        return True
    if any(value is each for each in inside) or isinstance(value, (*PLAIN, type, types.ModuleType)):
        return False
    held = list[Any]((getattr(value, "__dict__", None) or {}).values())
    if isinstance(value, list | tuple | set):
        held += value
    if isinstance(value, dict):
        held += value.values()
    if isinstance(value, types.FunctionType):
        held += [each for cell in value.__closure__ or () for each in content_of(cell)]
        held += value.__defaults__ or ()
    if isinstance(value, types.MethodType):
        held += [value.__self__, value.__func__]
    return any(holds_tensors(each, (*inside, value)) for each in held)


def _numbers_read(function: types.FunctionType) -> tuple[tuple[str, str], ...]:
    """The globals that a function names, where they are numbers, texts and the like."""
    found = function.__globals__
    read = [(name, found[name]) for name in global_names(function.__code__) if name in found]
    return tuple((name, text_of(value)) for name, value in read if isinstance(value, PLAIN))


def _own_methods(kind: type) -> list[Any]:
    """The methods of an ``autograd.Function``, with None for those that it has from torch."""
    found = [(getattr(kind, name, None), getattr(torch.autograd.Function, name, None)) for name in _METHODS]
    return [None if own is inherited else own for own, inherited in found]
