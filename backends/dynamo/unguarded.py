"""What Dynamo builds into a graph and sets no guard for: read at the first call, it would stay so at all later ones.

Such are numbers of a ``random.Random`` that a model holds, ``os.environ`` where a name is asked for that may be missing
(``get``, ``getenv``, ``in``), the order of an ``OrderedDict``, a list in a tuple of constants (its guard compares the
tuple with itself), hooks of all modules, and that a ``deque`` with ``maxlen`` drops what no longer fits.

Private torch API, tried on 2.13 and read in 2.11: ``current_tx`` of ``InstructionTranslator``, which knows the code
that a graph is made of, its ``side_effects`` on objects of the user's, its ``guards`` with the scopes in which their
names have a meaning, and its ``random_calls``; ``traced_code`` of the ``TracingContext``; ``_inst``, Python's own
generator.
"""

from __future__ import annotations

import os
import random
import re
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslator

from reroll.capture.recorder.identity import Same, global_names
from reroll.errors import UnsupportedError
from reroll.graph.private import hooks_of_all_modules

_ENVIRONMENT = frozenset({"environ", "getenv"})


def unseen_hooks() -> tuple[Same, ...]:
    """The hooks of all modules, but for torch's own, which only watch (``FlopCounterMode``)."""
    hooks = hooks_of_all_modules()
    return tuple(Same(each) for each in hooks if not str(getattr(each, "__module__", "")).startswith("torch."))


def refuse_unguarded() -> None:
    """Raise UnsupportedError for what the graph that Dynamo is compiling would go on with, though it has changed."""
    output = _output()
    if output is None:
        return
    if any(getattr(call, "__self__", None) is not random._inst for call, *_ in output.random_calls):
        raise UnsupportedError(
            "The model draws a number from a random.Random of its own, of which torch.compile draws the same ones at "
            "every call. Draw before the call and pass what was drawn, or draw from torch (torch.rand)."
        )
    effects = output.side_effects
    held = [each for each in effects.keepalive if type(each) is deque and each.maxlen is not None]
    for variable in filter(effects.is_modified, filter(None, map(effects.id_to_variable.get, map(id, held)))):
        raise UnsupportedError(
            f"The model changes a collections.deque with maxlen{_named(variable.source)}, of which torch.compile "
            "forgets that it drops what no longer fits. Keep a list in its place, and cut it: "
            "self.last = [*self.last, new][-n:]."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """What the code of a graph has read at its first call: ``os.environ``, if it names that, the keys of each
    ``OrderedDict`` in their order, tuples that hold lists, by name, each with a copy, and the hooks of all modules."""

    environment: Mapping[Any, Any] | None
    orders: tuple[tuple[weakref.ref[OrderedDict[Any, Any]], tuple[Any, ...]], ...]
    tuples: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    hooks: tuple[Any, ...] = ()

    @classmethod
    def here(cls) -> Read:
        """What that of the graph has read that Dynamo is compiling."""
        output = _output()
        if output is None:
            return cls(None, ())
        named = any(map(_reads_environment, output.tracing_context.traced_code))
        held = [each for each in output.side_effects.keepalive if issubclass(type(each), OrderedDict)]
        orders = tuple((weakref.ref(each), tuple(OrderedDict.__iter__(each))) for each in held)
        return cls(dict(os.environ) if named else None, orders, _tuples(output), unseen_hooks())

    @property
    def changed(self) -> str:
        """What is another one now, and what to do about it; empty if nothing is."""
        if self.environment is not None and self.environment != os.environ:
            before, now = self.environment, dict(os.environ)
            names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
            return (
                f"The model reads os.environ, in which {', '.join(names)} changed since it was compiled, and "
                "torch.compile has read it once. Read it outside of the forward, and keep it in an attribute of the "
                "model."
            )
        if names := [name for name, (held, copy) in self.tuples.items() if held != copy]:
            return (
                f"The model reads a tuple with a list in it ({', '.join(names)}), and the list changed since it was "
                "compiled, which torch.compile does not see. Hold a list in place of the tuple."
            )
        if self.hooks != unseen_hooks():
            return (
                "A hook of all modules (torch.nn.modules.module.register_module_forward_hook and the like) was added "
                "or taken away since the model was compiled, which torch.compile does not see. Call "
                "torch.compiler.reset() behind it, or use hooks of single modules."
            )
        if any(_is_moved(reference(), order) for reference, order in self.orders):
            return (
                "The model reads a collections.OrderedDict whose order changed since it was compiled (move_to_end), "
                "which torch.compile does not see. Remove what is to be moved and set it again: held[key] = "
                "held.pop(key)."
            )
        return ""

    def refuse_changed(self) -> None:
        """Raise UnsupportedError where something is another one now."""
        if text := self.changed:
            raise UnsupportedError(text)


def _is_moved(held: OrderedDict[Any, Any] | None, order: tuple[Any, ...]) -> bool:
    """Whether the keys are those, in another order; other keys are Dynamo's to see."""
    keys = () if held is None else tuple(OrderedDict.__iter__(held))
    return keys != order and {*keys} == {*order}


def _tuples(output: Any) -> dict[str, tuple[Any, Any]]:
    """The tuples of constants that a graph has read, with a copy of each in which something can change."""
    scopes = {"L": output.local_scope, "G": output.global_scope}
    found = {}
    for guard in output.guards:
        if guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH"):
            with suppress(Exception):  # a name of Dynamo's own making
                name = _name(guard.originating_source)
                held = eval(name, dict(output.global_scope), scopes)
                if isinstance(held, tuple) and (copy := deepcopy(held)) is not held:
                    found[_shown(name)] = held, copy
    return found


def _output() -> Any:
    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def _named(source: Any) -> str:
    """What Dynamo calls an object of the user's, in brackets."""
    found = _shown(_name(source))
    return f" ({found})" if found else ""


def _name(source: Any) -> str:
    """The expression by which Dynamo finds an object; a method in torch 2.11, an attribute later."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _shown(name: str) -> str:
    found = re.sub(r"[LG]\['(\w+)'\]", r"\1", name)
    return re.sub(r"^fn\.__closure__\[\d+\]\.cell_contents", "self", found)  # reads a module's hooks with it


@lru_cache(maxsize=1 << 12)
def _reads_environment(code: CodeType) -> bool:
    return bool(_ENVIRONMENT & {*code.co_names}) and bool({"os", *_ENVIRONMENT} & {*global_names(code)})
