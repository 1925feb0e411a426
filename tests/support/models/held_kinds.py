"""Models that read something, and how it changes between calls: attributes, names, settings of libraries, modes.

A kind is a generator: it gives a model, changes what the model reads when it is asked for the next value, gives
nothing, and changes it back.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import gc
import importlib
import logging
import math
import os
import random
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from held_values import IN_PLACE, VALUES, Choice, D, Data, Descriptor, Own, Slots

Kind = Callable[[], Iterator[Any]]
KINDS: dict[str, Kind] = {}
SILENT: set[str] = set()
"""Kinds whose change does not show in results."""


def kind(name: str, *, shows: bool = True) -> Callable[[Kind], Kind]:
    """Note a kind by its name."""

    def noted(made: Kind) -> Kind:
        assert name not in KINDS, name
        KINDS[name] = made
        if not shows:
            SILENT.add(name)
        return made

    return noted


class Net(nn.Module):
    """A loop with a factor that comes from somewhere."""

    def __init__(self, factor: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.factor = factor
        self.p = nn.Parameter(torch.linspace(-1, 1, 4, dtype=D))
        self.fc = nn.Linear(4, 4, dtype=D)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        """States of all steps."""
        h, rows = x.new_zeros(x.shape[1], 4), []
        k = self.factor(self, x)
        for t in range(x.shape[0]):
            h = torch.tanh(self.fc(x[t]) + k * h * self.p)
            rows.append(h)
        return torch.stack(rows)


# --- a library that is installed -------------------------------------------------------------------------------------

_FILES = {
    "config.py": """
import functools, os
from contextvars import ContextVar
SLOPE = 0.5
TABLE = {"slope": 0.5}
ITEMS = [0.5]
ACT = abs
class Settings:
    def __init__(self): self.slope = 0.5
class Slotted:
    __slots__ = ("slope",)
    def __init__(self): self.slope = 0.5
class Base:
    slope = 0.5
    @classmethod
    def get(cls): return cls.slope
    @staticmethod
    def whole(): return Base.slope
class Holder(Base): pass
class Namespace:
    inner = Holder
settings, slotted = Settings(), Slotted()
CONTEXT = ContextVar("lib", default=0.5)
def get(): return SLOPE
def default(k=0.5): return k
def keyword(*, k=0.5): return k
def make(k):
    def inner(): return k
    def change(new):
        nonlocal k
        k = new
    return inner, change
inner, change = make(0.5)
@functools.lru_cache
def cached(): return SLOPE
def wrap(f):
    @functools.wraps(f)
    def wrapped(*args): return f(*args) * SCALE
    return wrapped
SCALE = 0.5
@wrap
def decorated(): return 1.0
def lazy(): return LAZY[0]()
LAZY = [get]
""",
    "core.py": """
import functools, importlib, os, sys
import torch
from torch import nn
import torch.nn.functional as F
from . import config
from .config import (ACT, CONTEXT, ITEMS, TABLE, Base, Holder, Namespace, Settings, cached, decorated, default, get,
                     inner, keyword, lazy, settings, slotted)
SLOPE = 0.5
def by_global(): return SLOPE
def by_module(): return config.SLOPE
def by_module_of_module(): return reroll_kinds_lib.config.SLOPE
import reroll_kinds_lib
def by_class(): return Holder.slope
def by_class_in_module(): return config.Holder.slope
def by_class_in_class(): return Namespace.inner.slope
def by_singleton(): return settings.slope
def by_slotted(): return slotted.slope
def by_singleton_in_module(): return config.settings.slope
def by_default(): return default()
def by_keyword(): return keyword()
def by_function(): return get()
def by_function_in_module(): return config.get()
def by_getattr(): return getattr(config, "SLOPE")
def by_getattr_default(): return getattr(config, "MORE", 0.5)
def by_import():
    from . import config as c
    return c.SLOPE
def by_import_name():
    from reroll_kinds_lib.config import SLOPE as s
    return s
def by_import_module(): return importlib.import_module("reroll_kinds_lib.config").SLOPE
def by_sys_modules(): return sys.modules["reroll_kinds_lib.config"].SLOPE
def by_class_method(): return Holder.get()
def by_static_method(): return Holder.whole()
def by_dict(): return TABLE["slope"]
def by_dict_in_module(): return config.TABLE["slope"]
def by_list(): return ITEMS[0]
def by_closure(): return inner()
def by_context(): return CONTEXT.get()
def by_context_in_module(): return config.CONTEXT.get()
def by_cache(): return cached()
def by_decorated(): return decorated()
def by_list_of_functions(): return lazy()
def by_environment(): return float(os.environ.get("REROLL_KINDS", "0.5"))
def by_getenv(): return float(os.getenv("REROLL_KINDS", "0.5"))
def by_globals(): return globals()["SLOPE"]
def by_instance(): return Settings().slope
def by_new_class(): return Holder().slope
def by_torch_function(): return F.softplus(torch.tensor(0.5, dtype=torch.float64))
def by_nested():
    def within(): return config.SLOPE
    return within()
def by_comprehension(): return sum(config.SLOPE for _ in range(1))
def by_lambda(): return (lambda: config.SLOPE)()
def by_alias():
    c = config
    return c.SLOPE
def by_argument(): return read(config)
def read(c): return c.SLOPE
def by_isinstance(): return 0.9 if hasattr(config, "MORE") else 0.5
class Layer(nn.Module):
    slope = 0.5
    def __init__(self): super().__init__()
    def forward(self, x): return x * self.factor()
    def factor(self): return config.SLOPE
class OfClass(Layer):
    def factor(self): return self.slope
class OfOther(Layer):
    def factor(self): return Holder.slope
class OfStatic(Layer):
    @staticmethod
    def factor(): return config.settings.slope
class OfType(Layer):
    def factor(self): return type(self).slope
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * config.SLOPE
    @staticmethod
    def backward(ctx, grad): return grad * config.SLOPE
class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1.0
    @staticmethod
    def backward(ctx, grad): return grad * config.SLOPE
""",
    "__init__.py": "from . import config, core\nVERSION = 0.5\n",
}


@functools.cache
def library() -> Any:
    """A small library in a folder of installed ones, and a script of the user's that calls it (``user``)."""
    folder = Path(tempfile.mkdtemp(prefix="reroll-kinds-"))
    installed = folder / "site-packages"
    (installed / "reroll_kinds_lib").mkdir(parents=True)
    for name, text in _FILES.items():
        (installed / "reroll_kinds_lib" / name).write_text(text)
    calls = re.findall(r"^def (by_\w+)", _FILES["core.py"], re.MULTILINE)
    script = [f"def {name}(net, x): return core.{name}()\n" for name in calls]
    (folder / "reroll_kinds_user.py").write_text("".join(["from reroll_kinds_lib import core\n", *script]))
    sys.path[:0] = [str(folder), str(installed)]
    importlib.invalidate_caches()
    found = importlib.import_module("reroll_kinds_lib")
    found.user = importlib.import_module("reroll_kinds_user")  # type: ignore[attr-defined]
    return found


def assign(space: Any, name: Any, value: Any) -> None:
    """Set an attribute or item."""
    if isinstance(space, dict | list):
        space[name] = value
    else:
        setattr(space, name, value)


def _change(places: list[tuple[Any, Any, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for space, name, value in places:
            missing = object()
            if isinstance(space, dict | list):
                before = space[name] if isinstance(space, list) else space.get(name, missing)
            else:
                before = getattr(space, name, missing)
            assign(space, name, value)
            if before is missing:
                stack.callback(space.pop if isinstance(space, dict) else functools.partial(delattr, space), name)
            else:
                stack.callback(assign, space, name, before)
        yield


def _sine(value: Tensor, *_: Any) -> Tensor:
    """Stands for another function."""
    return torch.sin(value)


_LIBRARY: dict[str, Callable[[Any], tuple[Any, Any, Any]]] = {
    **dict.fromkeys(["by_global", "by_globals"], lambda lib: (lib.core, "SLOPE", 0.9)),
    **dict.fromkeys(
        [
            *("by_module", "by_module_of_module", "by_function", "by_function_in_module", "by_getattr", "by_import"),
            *("by_import_name", "by_import_module", "by_sys_modules", "by_list_of_functions", "by_nested"),
            *("by_comprehension", "by_lambda", "by_alias", "by_argument"),
        ],
        lambda lib: (lib.config, "SLOPE", 0.9),
    ),
    **dict.fromkeys(
        ["by_class", "by_class_in_module", "by_class_in_class", "by_class_method", "by_static_method", "by_new_class"],
        lambda lib: (lib.config.Base, "slope", 0.9),
    ),
    "by_singleton": lambda lib: (lib.config.settings, "slope", 0.9),
    "by_slotted": lambda lib: (lib.config.slotted, "slope", 0.9),
    "by_singleton_in_module": lambda lib: (lib.config.settings, "slope", 0.9),
    "by_default": lambda lib: (lib.config.default, "__defaults__", (0.9,)),
    "by_keyword": lambda lib: (lib.config.keyword, "__kwdefaults__", {"k": 0.9}),
    "by_getattr_default": lambda lib: (lib.config, "MORE", 0.9),
    "by_isinstance": lambda lib: (lib.config, "MORE", 0.9),
    "by_dict": lambda lib: (lib.config.TABLE, "slope", 0.9),
    "by_dict_in_module": lambda lib: (lib.config.TABLE, "slope", 0.9),
    "by_list": lambda lib: (lib.config.ITEMS, 0, 0.9),
    "by_decorated": lambda lib: (lib.config, "SCALE", 0.9),
    "by_environment": lambda _: (_Environment(), "REROLL_KINDS", "0.9"),
    "by_getenv": lambda _: (_Environment(), "REROLL_KINDS", "0.9"),
    "by_instance": lambda lib: (lib.config.Settings, "__init__", lambda self: setattr(self, "slope", 0.9)),
    "by_torch_function": lambda _: (functional, "softplus", _sine),
}


class _Environment:
    """Variables of the process."""

    def __getattr__(self, name: str) -> str:
        if name not in os.environ:
            raise AttributeError(name)
        return os.environ[name]

    def __setattr__(self, name: str, value: str) -> None:
        os.environ[name] = value

    def __delattr__(self, name: str) -> None:
        del os.environ[name]


def _note_library() -> None:
    for name, place in _LIBRARY.items():

        def read(name: str = name, place: Any = place) -> Iterator[Any]:
            yield Net(getattr(library().user, name))
            yield from _change([place(library())])

        def named(name: str = name, place: Any = place) -> Iterator[Any]:
            yield Net(lambda net, x: net.read(), read=getattr(library().core, name))
            yield from _change([place(library())])

        KINDS[f"library, {name}"], KINDS[f"library, held, {name}"] = read, named


def _closure() -> Iterator[Any]:
    core = library().core
    yield Net(lambda net, x: core.by_closure())
    library().config.change(0.9)
    yield
    library().config.change(0.5)


def _context(name: str) -> Iterator[Any]:
    yield Net(getattr(library().user, name))
    token = library().config.CONTEXT.set(0.9)
    yield
    library().config.CONTEXT.reset(token)


def _cache() -> Iterator[Any]:
    core, config = library().core, library().config
    yield Net(lambda net, x: core.by_cache())
    config.SLOPE = 0.9
    config.cached.cache_clear()
    yield
    config.SLOPE = 0.5
    config.cached.cache_clear()


_note_library()
KINDS["library, closure"], KINDS["library, cache"] = _closure, _cache
KINDS["library, context variable"] = functools.partial(_context, "by_context")
KINDS["library, context variable of a module"] = functools.partial(_context, "by_context_in_module")


def _note_layers() -> None:
    places: dict[str, Callable[[Any], tuple[Any, Any, Any]]] = {
        "Layer": lambda lib: (lib.config, "SLOPE", 0.9),
        "OfClass": lambda lib: (lib.core.Layer, "slope", 0.9),
        "OfType": lambda lib: (lib.core.Layer, "slope", 0.9),
        "OfOther": lambda lib: (lib.config.Base, "slope", 0.9),
        "OfStatic": lambda lib: (lib.config.settings, "slope", 0.9),
        "Function": lambda lib: (lib.config, "SLOPE", 0.9),
        "Backward": lambda lib: (lib.config, "SLOPE", 0.9),
    }
    for name, place in places.items():

        def layer(name: str = name, place: Any = place) -> Iterator[Any]:
            kept = getattr(library().core, name)
            if issubclass(kept, nn.Module):
                yield Net(lambda net, x: net.layer(net.p), layer=kept())
            else:
                yield Net(lambda net, x: kept.apply(net.p))
            yield from _change([place(library())])

        KINDS[f"library, layer, {name}"] = layer


_note_layers()


# --- where a value stands ---------------------------------------------------------------------------------------------

GLOBAL: Any = 0.5
MODULE = types.ModuleType("reroll_kinds_module")
exec("value = 0.5\ndef get(): return value\nclass Of:\n    value = 0.5", vars(MODULE))  # a module of the user's


class WithSlots(Slots):
    __slots__ = ("more",)


Place = Callable[[Any, Callable[[Any], Any]], tuple[Any, Callable[[Any], None]]]


def in_attribute(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    net = Net(lambda net, x: of(net.value), value=value)
    return net, lambda new: replaced(net, new)


def replaced(net: Any, value: Any) -> None:
    """Set an attribute, whatever was there before."""
    if hasattr(net, "value"):
        delattr(net, "value")
    net.value = value


def in_submodule(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    net = Net(lambda net, x: of(net.fc.value))
    net.fc.value = value
    return net, lambda new: replaced(net.fc, new)


def in_list(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    net = Net(lambda net, x: of(net.held[0]), held=[value])
    return net, lambda new: assign(net.held, 0, new)


def in_dict(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    net = Net(lambda net, x: of(net.held["a"]["b"]), held={"a": {"b": value}})
    return net, lambda new: assign(net.held["a"], "b", new)  # type: ignore[index]


def in_tuple(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    net = Net(lambda net, x: of(net.held[0][1]), held=((1, value),))
    return net, lambda new: assign(net, "held", ((1, new),))


def in_closure(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    def change(new: Any) -> None:
        nonlocal value
        value = new

    return Net(lambda net, x: of(value)), change


def in_global(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    assign(globals(), "GLOBAL", value)
    return Net(lambda net, x: of(GLOBAL)), functools.partial(assign, globals(), "GLOBAL")


def in_module(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    MODULE.value = value  # type: ignore[attr-defined]
    return Net(lambda net, x: of(MODULE.value)), functools.partial(assign, MODULE, "value")


def in_module_function(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    MODULE.value = value  # type: ignore[attr-defined]
    return Net(lambda net, x: of(MODULE.get())), functools.partial(assign, MODULE, "value")


def in_library(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    core, config = library().core, library().config
    config.SLOPE = value
    return Net(lambda net, x: of(core.by_module())), functools.partial(assign, config, "SLOPE")


def in_library_object(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    core, config = library().core, library().config
    config.settings.slope = value
    return Net(lambda net, x: of(core.by_singleton_in_module())), functools.partial(assign, config.settings, "slope")


def in_library_class(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    core, config = library().core, library().config
    config.Base.slope = value
    return Net(lambda net, x: of(core.by_class())), functools.partial(assign, config.Base, "slope")


def in_class(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    class Base(Net):
        pass

    class Derived(Base):
        pass

    Base.value = value  # type: ignore[attr-defined]
    return Derived(lambda net, x: of(type(net).value)), functools.partial(assign, Base, "value")


def in_default(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    def read(held: Any = value) -> Any:
        return of(held)

    return Net(lambda net, x: net.read(), read=read), lambda new: assign(read, "__defaults__", (new,))


def in_keyword(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    def read(*, held: Any = value) -> Any:
        return of(held)

    return Net(lambda net, x: net.read(), read=read), lambda new: assign(read, "__kwdefaults__", {"held": new})


def in_slots(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    held = WithSlots(value)
    return Net(lambda net, x: of(net.held.slope), held=held), functools.partial(assign, held, "slope")


def in_data(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    held = Data(value)
    return Net(lambda net, x: of(net.held.slope), held=held), functools.partial(assign, held, "slope")


def in_partial(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    net = Net(lambda net, x: net.held(), held=functools.partial(of, value))
    return net, lambda new: assign(net, "held", functools.partial(of, new))


def in_property(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    held = {"value": value}

    class Derived(Net):
        value = property(lambda net: held["value"])

    return Derived(lambda net, x: of(net.value)), functools.partial(assign, held, "value")


def in_descriptor(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    class Derived(Net):
        value = Descriptor(None)

    vars(Derived)["value"].value = value
    return Derived(lambda net, x: of(net.value)), functools.partial(assign, vars(Derived)["value"], "value")


def in_buffer_list(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    net = Net(lambda net, x: of(next(iter(net.held))), held=[value, 1])
    return net, lambda new: assign(net, "held", [new, 1])


def in_context(value: Any, of: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    held: ContextVar[Any] = ContextVar("held")
    held.set(value)
    return Net(lambda net, x: of(held.get())), lambda new: (held.set(new), None)[1]


PLACES: dict[str, Place] = {
    name: place for name, place in globals().items() if name.startswith("in_") and callable(place)
}


def combined(place: str, value: str) -> Kind:
    """A kind: a value at a place is replaced."""

    def found() -> Iterator[Any]:
        before, after, of = VALUES[value]
        one = before()
        net, change = PLACES[place](one, of)
        yield net
        change(after())
        yield
        change(one)

    return found


def combined_in_place(place: str, value: str) -> Kind:
    """A kind: a value at a place is changed as it stands there."""

    def found() -> Iterator[Any]:
        make, change, back, of = IN_PLACE[value]
        one = make()
        net, _ = PLACES[place](one, of)
        yield net
        change(one)
        yield
        back(one)

    return found


# --- what modules have, and what is around a call ---------------------------------------------------------------------


def once(net: Any, change: Callable[[Any], Any], back: Callable[[Any], Any]) -> Iterator[Any]:
    """A model, changed and changed back."""
    yield net
    change(net)
    yield
    back(net)


def _plain(net: Any, x: Tensor) -> Any:
    return 0.5


def _read(read: Callable[[], Any]) -> Net:
    """A model that asks something of torch or Python."""
    return Net(lambda net, x: 0.9 if read() else 0.5)


def within(name: str, net: Callable[[], Any], around: Callable[[], Any], *, shows: bool = True) -> None:
    """A kind: a call is made within something."""

    def found() -> Iterator[Any]:
        yield net()
        with around():
            yield

    kind(name, shows=shows)(found)


def changed(name: str, net: Callable[[], Any], *places: tuple[Any, str, Any], shows: bool = True) -> None:
    """A kind: an attribute is another one."""

    def found() -> Iterator[Any]:
        yield net()
        yield from _change([*places])

    kind(name, shows=shows)(found)


@contextlib.contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """A setting of torch's, put back."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


class Dropped(Net):
    def forward(self, x: Tensor) -> Tensor:
        """With dropout."""
        found: Tensor = functional.dropout(super().forward(x), 0.5, self.training)
        return found


class Blocks(Net):
    def __init__(self) -> None:
        super().__init__(_plain)
        self.blocks = nn.ModuleList([nn.Linear(4, 4, dtype=D), nn.Tanh(), nn.Linear(4, 4, dtype=D)])
        self.by_name = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Linear(4, 4, dtype=D)})
        self.weights = nn.ParameterList([nn.Parameter(torch.full((4,), 0.5, dtype=D)) for _ in range(2)])
        self.register_buffer("mask", torch.ones(4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        """A loop through lists of modules."""
        h, rows = x.new_zeros(x.shape[1], 4), []
        for t in range(x.shape[0]):
            h = self.fc(x[t]) + 0.5 * h
            for block in self.blocks:
                h = block(h)
            for weight in self.weights:
                h = torch.tanh(h * weight)
            for block in self.by_name.values():
                h = block(h)
            h = h * self.mask  # type: ignore[operator]
            rows.append(h)
        return torch.stack(rows)


def swapped(net: Any) -> None:
    """The last block first."""
    blocks = list(net.blocks)
    for at, block in enumerate([blocks[-1], *blocks[:-1]]):
        net.blocks[at] = block


def unswapped(net: Any) -> None:
    blocks = list(net.blocks)
    for at, block in enumerate([*blocks[1:], blocks[0]]):
        net.blocks[at] = block


class Derived(Net):
    def forward(self, x: Tensor) -> Tensor:
        """Another sign."""
        return -super().forward(x)


class Forwarded(nn.Module):
    """A module that takes attributes from another place."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.fc = {"slope": 0.5}, nn.Linear(4, 4, dtype=D)

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__.get("held", {})
        return held[name] if name in held else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        """A loop."""
        h, rows = x.new_zeros(x.shape[1], 4), []
        for t in range(x.shape[0]):
            h = torch.tanh(self.fc(x[t]) + self.slope * h)
            rows.append(h)
        return torch.stack(rows)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Twice what it is given."""
        return 2 * x


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Another function in the place of one."""
        found = function(*args, **(kwargs or {}))
        return found * 0.5 if function is torch.tanh else found


def halve(module: Any, args: Any, y: Any) -> Any:
    return y * 0.5 if isinstance(module, nn.Linear) else None


def halve_first(module: Any, args: Any) -> Any:
    return (args[0] * 0.5,) if isinstance(module, nn.Linear) else None


def halve_gradient(module: Any, grads: Any, _: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in grads) if isinstance(module, nn.Linear) else None


def hooked(name: str, add: Callable[[Any], Any]) -> None:
    """A kind: a hook is added and removed."""

    def found() -> Iterator[Any]:
        net = Net(_plain)
        yield net
        handle = add(net)
        yield
        handle.remove()

    kind(name)(found)


MODULES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "training of all": (lambda: Dropped(_plain), lambda net: net.eval(), lambda net: net.train()),
    "training read": (
        lambda: Net(lambda net, x: 0.5 if net.fc.training else 0.9),
        lambda net: net.fc.eval(),
        lambda net: net.fc.train(),
    ),
    "requires_grad": (
        lambda: Net(_plain),
        lambda net: net.p.requires_grad_(False),
        lambda net: net.p.requires_grad_(),
    ),
    "dtype": (lambda: Net(_plain), lambda net: net.float(), lambda net: net.double()),
    "data of a parameter": (
        lambda: Net(_plain),
        lambda net: net.p.data.mul_(2),
        lambda net: net.p.data.mul_(0.5),
    ),
    "data replaced": (
        lambda: Net(_plain),
        lambda net: setattr(net.p, "data", 2 * net.p.data),
        lambda net: setattr(net.p, "data", 0.5 * net.p.data),
    ),
    "strides": (
        lambda: Net(_plain),
        lambda net: setattr(net.fc.weight, "data", net.fc.weight.data.t().contiguous().t()),
        lambda net: setattr(net.fc.weight, "data", net.fc.weight.data.contiguous()),
    ),
    "other parameter": (
        lambda: Net(_plain),
        lambda net: setattr(net, "p", nn.Parameter(torch.ones(4, dtype=D))),
        lambda net: setattr(net, "p", nn.Parameter(torch.linspace(-1, 1, 4, dtype=D))),
    ),
    "shape of a parameter": (
        lambda: Net(_plain),
        lambda net: setattr(net, "p", nn.Parameter(torch.ones(1, dtype=D))),
        lambda net: setattr(net, "p", nn.Parameter(torch.linspace(-1, 1, 4, dtype=D))),
    ),
    "tied": (
        lambda: Net(lambda net, x: net.fc.bias),
        lambda net: setattr(net.fc, "bias", net.p),
        lambda net: setattr(net.fc, "bias", nn.Parameter(torch.ones(4, dtype=D))),
    ),
    "no bias": (
        lambda: Net(_plain),
        lambda net: setattr(net.fc, "bias", None),
        lambda net: setattr(net.fc, "bias", nn.Parameter(torch.ones(4, dtype=D))),
    ),
    "buffer": (
        Blocks,
        lambda net: setattr(net, "mask", torch.full((4,), 0.5, dtype=D)),
        lambda net: setattr(net, "mask", torch.ones(4, dtype=D)),
    ),
    "shape of a buffer": (
        Blocks,
        lambda net: setattr(net, "mask", torch.full((1,), 0.5, dtype=D)),
        lambda net: setattr(net, "mask", torch.ones(4, dtype=D)),
    ),
    "buffer in place": (Blocks, lambda net: net.mask.mul_(0.5), lambda net: net.mask.mul_(2)),
    "more blocks": (
        Blocks,
        lambda net: net.blocks.append(Doubled()),
        lambda net: net.blocks.__delitem__(-1),
    ),
    "order of blocks": (Blocks, swapped, unswapped),
    "named block": (
        Blocks,
        lambda net: net.by_name.update({"a": Doubled()}),
        lambda net: net.by_name.update({"a": nn.Tanh()}),
    ),
    "more weights": (
        Blocks,
        lambda net: net.weights.append(nn.Parameter(torch.full((4,), 0.3, dtype=D))),
        lambda net: setattr(net, "weights", nn.ParameterList(list(net.weights)[:-1])),
    ),
    "other block": (
        Blocks,
        lambda net: net.blocks.__setitem__(1, nn.Sigmoid()),
        lambda net: net.blocks.__setitem__(1, nn.Tanh()),
    ),
    "class of the model": (
        lambda: Net(_plain),
        lambda net: setattr(net, "__class__", Derived),
        lambda net: setattr(net, "__class__", Net),
    ),
    "forward on the model": (
        lambda: Net(_plain),
        lambda net: setattr(net.fc, "forward", lambda x: 2 * x),
        lambda net: delattr(net.fc, "forward"),
    ),
    "method on the model": (
        lambda: Net(lambda net, x: net.gain(), gain=lambda: 0.5),
        lambda net: setattr(net, "gain", lambda: 0.9),
        lambda net: setattr(net, "gain", lambda: 0.5),
    ),
    "attributes from elsewhere": (
        Forwarded,
        lambda net: net.held.update(slope=0.9),
        lambda net: net.held.update(slope=0.5),
    ),
    "parametrization": (
        lambda: Net(_plain),
        lambda net: parametrize.register_parametrization(net.fc, "weight", Doubled()),
        lambda net: parametrize.remove_parametrizations(net.fc, "weight", leave_parametrized=False),
    ),
    "weight norm": (
        lambda: Net(_plain),
        lambda net: (parametrizations.weight_norm(net.fc), net.fc.parametrizations.weight.original0.data.mul_(2)),
        lambda net: parametrize.remove_parametrizations(net.fc, "weight"),
    ),
    "a model's part": (
        lambda: Net(lambda net, x: net.fc(net.p)),
        lambda net: setattr(net, "fc", nn.Sequential(nn.Linear(4, 4, dtype=D), nn.Tanh())),
        lambda net: setattr(net, "fc", nn.Linear(4, 4, dtype=D)),
    ),
    "number of an activation": (
        lambda: Net(lambda net, x: net.act(net.p), act=nn.LeakyReLU(0.5)),
        lambda net: setattr(net.act, "negative_slope", 0.1),
        lambda net: setattr(net.act, "negative_slope", 0.5),
    ),
    "momentum": (
        lambda: Net(lambda net, x: net.norm(net.p[None])[0], norm=nn.LayerNorm(4, dtype=D)),
        lambda net: setattr(net.norm, "eps", 0.5),
        lambda net: setattr(net.norm, "eps", 1e-5),
    ),
    "hidden buffer": (
        lambda: Net(lambda net, x: len(list(net.named_buffers())) * 0.3 + 0.1),
        lambda net: net.register_buffer("more", torch.ones(1)),
        lambda net: delattr(net, "more"),
    ),
}
for name, (net, change, back) in MODULES.items():
    KINDS[f"module, {name}"] = functools.partial(lambda net, *how: once(net(), *how), net, change, back)
changed("forward of a class", lambda: Net(_plain), (nn.Linear, "forward", lambda fc, x: x @ fc.weight))
changed("__call__ of a class", lambda: Net(_plain), (nn.Linear, "__call__", lambda fc, x: x @ fc.weight))
changed("method of a class", lambda: Derived(_plain), (Net, "forward", lambda net, x: net.fc(x) * net.p))
changed(
    "method of an own class",
    lambda: Net(lambda net, x: net.o.method(1.0), o=Own()),
    (Own, "method", lambda o, x: 0.9),
)
changed("attribute of an own class", lambda: Net(lambda net, x: net.o.slope, o=Own()), (Own, "slope", 0.9))
changed("new attribute of an object", lambda: Net(lambda net, x: getattr(MODULE, "more", 0.5)), (MODULE, "more", 0.9))
changed("member of an enum", lambda: Net(lambda net, x: Choice.SLOW.value), (Choice.SLOW, "_value_", 0.9))
changed("__getitem__ of a class", lambda: Net(lambda net, x: net.o(1.0), o=Own()), (Own, "__call__", lambda o, x: 0.9))


hooked("hook, forward", lambda net: net.fc.register_forward_hook(halve))
hooked("hook, of the model", lambda net: net.register_forward_hook(lambda module, args, y: y * 0.5))
hooked("hook, before", lambda net: net.fc.register_forward_pre_hook(halve_first))
hooked("hook, before the model", lambda net: net.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)))
hooked("hook, backward", lambda net: net.fc.register_full_backward_hook(halve_gradient))
hooked("hook, of a parameter", lambda net: net.p.register_hook(lambda grad: grad * 0.5))
hooked("hook, all forward", lambda net: nn.modules.module.register_module_forward_hook(halve))
hooked("hook, all before", lambda net: nn.modules.module.register_module_forward_pre_hook(halve_first))
hooked("hook, all backward", lambda net: nn.modules.module.register_module_full_backward_hook(halve_gradient))


_BACKENDS: Any = torch.backends


def _matmul() -> Any:
    return torch.backends.cuda.matmul


def _collect(on: bool) -> None:
    (gc.enable if on else gc.disable)()


def _argv(value: list[str]) -> None:
    sys.argv[:] = value


@contextlib.contextmanager
def _many_filters() -> Iterator[None]:
    with warnings.catch_warnings():
        for number in range(60):
            warnings.filterwarnings("ignore", f"kinds {number}")
        yield


@contextlib.contextmanager
def _module(name: str) -> Iterator[None]:
    sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


plainly = functools.partial(Net, _plain)
QUESTIONS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "gradients": (torch.is_grad_enabled, torch.no_grad),
    "inference": (torch.is_inference_mode_enabled, torch.inference_mode),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu")),
    "autocast's dtype": (
        lambda: torch.get_autocast_dtype("cpu") is torch.float16,
        lambda: setting(
            lambda: torch.get_autocast_dtype("cpu"), lambda v: torch.set_autocast_dtype("cpu", v), torch.float16
        ),
    ),
    "default dtype": (
        lambda: torch.get_default_dtype() is torch.float64,
        lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    ),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda: setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    ),
    "precision": (
        lambda: torch.get_float32_matmul_precision() == "medium",
        lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    ),
    "precision of all backends": (
        lambda: _BACKENDS.fp32_precision == "tf32",
        lambda: setting(
            lambda: _BACKENDS.fp32_precision,
            lambda v: setattr(_BACKENDS, "fp32_precision", v),
            "tf32",
        ),
    ),
    "precision of a backend": (
        lambda: _BACKENDS.mkldnn.matmul.fp32_precision == "bf16",
        lambda: setting(
            lambda: _BACKENDS.mkldnn.matmul.fp32_precision,
            lambda v: setattr(_BACKENDS.mkldnn.matmul, "fp32_precision", v),
            "bf16",
        ),
    ),
    "tf32": (
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: setting(
            lambda: torch.backends.cuda.matmul.allow_tf32, lambda v: setattr(_matmul(), "allow_tf32", v), True
        ),
    ),
    "cudnn": (lambda: not torch.backends.cudnn.enabled, lambda: torch.backends.cudnn.flags(enabled=False)),
    "mkldnn": (lambda: not torch.backends.mkldnn.enabled, lambda: torch.backends.mkldnn.flags(enabled=False)),
    "cudnn benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda: setting(
            lambda: torch.backends.cudnn.benchmark, lambda v: setattr(torch.backends.cudnn, "benchmark", v), True
        ),
    ),
    "einsum": (
        lambda: torch.backends.opt_einsum.strategy == "greedy",
        lambda: setting(
            lambda: torch.backends.opt_einsum.strategy,
            lambda v: setattr(torch.backends.opt_einsum, "strategy", v),
            "greedy",
        ),
    ),
    "flash": (
        lambda: not torch.backends.cuda.flash_sdp_enabled(),
        lambda: setting(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    ),
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "threads": (
        lambda: torch.get_num_threads() == 2,
        lambda: setting(torch.get_num_threads, torch.set_num_threads, 2),
    ),
    "multithreading": (
        lambda: not torch.autograd.is_multithreading_enabled(),
        lambda: torch.autograd.set_multithreading_enabled(False),
    ),
    "default device": (
        lambda: torch.get_default_device() == torch.device("cpu", 0),
        lambda: torch.device("cpu", 0),
    ),
    "fill": (
        lambda: not torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        lambda: setting(
            lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            lambda v: setattr(torch.utils.deterministic, "fill_uninitialized_memory", v),
            False,
        ),
    ),
    "numpy's errors": (lambda: np.geterr()["divide"] == "raise", lambda: np.errstate(divide="raise")),
    "decimal": (lambda: decimal.getcontext().prec == 3, lambda: decimal.localcontext(decimal.Context(prec=3))),
    "collector": (lambda: not gc.isenabled(), lambda: setting(gc.isenabled, _collect, False)),
    "folder": (
        lambda: os.getcwd() == "/",  # noqa: PTH109  # what people ask
        lambda: setting(os.getcwd, os.chdir, "/"),
    ),
    "arguments": (lambda: len(sys.argv) > 50, lambda: setting(lambda: sys.argv[:], _argv, ["a"] * 60)),
    "recursion": (
        lambda: sys.getrecursionlimit() == 5000,
        lambda: setting(sys.getrecursionlimit, sys.setrecursionlimit, 5000),
    ),
    "logging": (
        lambda: logging.getLogger("kinds.b").isEnabledFor(logging.DEBUG),
        lambda: setting(
            lambda: logging.getLogger("kinds.b").level, logging.getLogger("kinds.b").setLevel, logging.DEBUG
        ),
    ),
    "root logging": (
        lambda: logging.root.level == logging.DEBUG,
        lambda: setting(lambda: logging.root.level, logging.root.setLevel, logging.DEBUG),
    ),
    "warnings": (lambda: len(warnings.filters) > 40, _many_filters),
    "environment": (
        lambda: os.environ.get("REROLL_KINDS") == "1",
        lambda: setting(lambda: "0", lambda v: os.environ.__setitem__("REROLL_KINDS", v), "1"),
    ),
    "modules": (
        lambda: "reroll_kinds_more" in sys.modules,
        lambda: _module("reroll_kinds_more"),
    ),
}
for name, (read, around) in QUESTIONS.items():
    within(f"asked, {name}", functools.partial(_read, read), around)
within("mode of functions", plainly, Mode)
within("mode, no gradients", plainly, torch.no_grad, shows=False)
within("mode, inference", plainly, torch.inference_mode, shows=False)
within("mode, autocast", lambda: Net(_plain).float(), lambda: torch.autocast("cpu"))
within(
    "mode, default dtype",
    lambda: Net(lambda net, x: torch.full((4,), 1 / 3).double()),
    lambda: setting(torch.get_default_dtype, torch.set_default_dtype, D),
)
within("stance", plainly, lambda: torch.compiler.set_stance("force_eager"), shows=False)


changed("patched, functional", lambda: Net(lambda net, x: functional.softplus(net.p)), (functional, "softplus", _sine))
changed(
    "patched, through torch.nn",
    lambda: Net(lambda net, x: nn.functional.softplus(net.p)),
    (functional, "softplus", _sine),
)
changed(
    "patched, within torch",
    lambda: Net(lambda net, x: net.act(net.p), act=nn.Softplus()),
    (functional, "softplus", _sine),
)
changed("patched, torch", lambda: Net(lambda net, x: torch.sin(net.p)), (torch, "sin", torch.cos))
changed("patched, in the loop", lambda: Net(_plain), (torch, "tanh", torch.sin))
changed("patched, method of tensors", lambda: Net(lambda net, x: net.p.sin()), (Tensor, "sin", Tensor.cos))
changed(
    "patched, operator of tensors", lambda: Net(lambda net, x: net.p % 0.3), (Tensor, "__mod__", lambda a, b: a * b)
)
changed("patched, math", lambda: Net(lambda net, x: math.sqrt(0.25)), (math, "sqrt", lambda v: 0.9))
changed("patched, numpy", lambda: Net(lambda net, x: float(np.mean([0.5]))), (np, "mean", lambda v: 0.9))
changed("patched, random", lambda: Net(lambda net, x: 0.5 if random.seed else 0.9), (random, "seed", None))  # type: ignore[truthy-function]
changed("patched, builtin", lambda: Net(lambda net, x: 0.1 * len([1, 2])), (__import__("builtins"), "len", lambda v: 9))
changed("patched, constant of math", lambda: Net(lambda net, x: math.pi / 6), (math, "pi", 5.0))
changed(
    "patched, init",
    lambda: Net(lambda net, x: functional.leaky_relu(net.p)),
    (functional.leaky_relu, "__defaults__", (0.5, False)),
)


SILENT.add("module, strides")
