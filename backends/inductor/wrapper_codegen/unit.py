"""Building for a CPU: a graph's kernels in one translation unit.

Inductor compiles every kernel by itself, and nearly all of that is headers (0.7 s of 0.8).

Private torch API, tried on 2.11 and 2.13: ``AsyncCompile.cpp_pybinding`` and ``wait`` (called by the code that inductor
writes), ``CppPythonBindingsCodeCache`` and ``PyCodeCache`` (build, load and cache on disk), ``CppCompileError``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from reroll.backends.inductor.wrapper_codegen.chains import KERNEL_NAME, chained, included, within
from reroll.backends.inductor.wrapper_codegen.machine import load, made_once
from reroll.backends.inductor.wrapper_codegen.strides import quick
from reroll.errors import warn

_TABLE = "static PyMethodDef py_methods[] = {"
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True, slots=True)
class Pending:
    """A kernel of a unit that is not built: the first call does that."""

    unit: Unit
    number: int

    def __call__(self, *operands: Any) -> Any:
        """Run it."""
        self.unit.settle()
        return self.unit.functions[self.number](*operands)


@dataclass(slots=True)
class Unit:
    """Kernels that become one translation unit when the first of them is asked for. ``inside``: what holds meanwhile;
    ``places``: where wrappers that are loaded already look for kernels, by name."""

    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    kernels: dict[tuple[tuple[str, ...], str], int] = field(default_factory=dict)
    functions: list[Any] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str, int]] = field(default_factory=list)

    def add(self, types: tuple[str, ...], source: str) -> Pending:
        """A kernel, with the C types of its arguments; equal kernels are one."""
        return Pending(self, self.kernels.setdefault((types, source), len(self.kernels)))

    def built(self) -> list[Any]:
        """The compiled functions."""
        if len(self.functions) != len(self.kernels):
            from torch._inductor.codecache import CppPythonBindingsCodeCache
            from torch._inductor.exc import CppCompileError

            try:
                module = load(self._source())()
                self.functions = [getattr(module, f"kernel{number}") for number in self.kernels.values()]
            except CppCompileError as error:
                warn(
                    f"The kernels of a segment could not be compiled together ({error}); each is compiled by itself.",
                )
                one_by_one = CppPythonBindingsCodeCache.load_pybinding
                self.functions = [one_by_one(list(types), source) for types, source in self.kernels]
        return self.functions

    def settle(self) -> None:
        """Build the kernels, and put them where wrappers look for them."""
        with quick_builds(), self.inside():
            functions = self.built()
            while self.places:
                scope, name, number = self.places.pop()
                scope[name] = functions[number]

    def _source(self) -> str:
        bodies, calls, rows = list[str](), list[str](), list[str]()
        for (types, source), number in self.kernels.items():
            bodies.append(within(f"unit{number}", source, f"kernel{number}"))
            calls.append(_binding(number, types))
            rows.append(f'{{"kernel{number}", kernel{number}_py, METH_VARARGS, ""}},')
        suffix = bound().replace(_TABLE, "\n".join([*calls, _TABLE, *rows]))
        return "\n".join([*included(source for _, source in self.kernels), *bodies, suffix])


def bound() -> str:
    """What makes a translation unit a Python module, with a function ``kernel`` that does nothing."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    made: str = CppPythonBindingsCodeCache.suffix_template.format(
        arg_len=0, call_entry_func="Py_RETURN_NONE;", entry_func="kernel", extra_parse_arg=""
    )
    return made


def _binding(number: int, types: tuple[str, ...]) -> str:
    """The Python function of a kernel."""
    given = ", ".join(f"parse_arg<{each.replace('const ', '')}>(args, {at})" for at, each in enumerate(types))
    return f"""static PyObject* kernel{number}_py(PyObject* self, PyObject* args) {{
    try {{
        if (!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args) != {len(types)})
            throw std::runtime_error("requires {len(types)} args");
        unit{number}::kernel{number}({given});
        Py_RETURN_NONE;
    }} catch (std::exception const& error) {{
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }}
}}"""


@contextmanager
def quick_builds(*, build: bool = True, later: Unit | None = None) -> Iterator[None]:
    """Inside, what this thread compiles for a CPU is one translation unit per graph, and what is kept for this machine
    is taken. With ``build=False`` the text of wrappers is written as inductor does, and no kernel of it is built. With
    a unit for ``later`` its kernels are built when it is settled.

    Another thread waits: what is patched must be put back in turn.
    """
    with _ONE_AT_A_TIME, _patched(build, later):
        yield


@contextmanager
def _patched(build: bool, later: Unit | None) -> Iterator[None]:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.codegen import cpp

    unit, thread = later or Unit(), threading.get_ident()
    inner, wait, write = AsyncCompile.cpp_pybinding, AsyncCompile.wait, PyCodeCache.write

    def written(source: str, extra: str = "") -> tuple[str, str]:
        return write(chained(source) if build and threading.get_ident() == thread else source, extra)

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str, *rest: Any, **options: Any) -> Any:
        whole = threading.get_ident() == thread and not rest and not options
        if not whole or len(KERNEL_NAME.findall(source_code)) != 1:
            return inner(self, argtypes, source_code, *rest, **options)
        return unit.add(tuple(argtypes), source_code)

    def resolved(self: Any, scope: dict[str, Any]) -> None:
        for name, value in scope.items():
            if build and isinstance(value, Pending) and later is not None:
                later.places.append((scope, name, value.number))
            elif build and isinstance(value, Pending):
                scope[name] = value.unit.built()[value.number]
        wait(self, scope)

    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding),
        mock.patch.object(AsyncCompile, "wait", resolved),
        mock.patch.object(PyCodeCache, "write", written),
        mock.patch.object(cpp, "stride_at_vec_range", quick(vars(cpp)["stride_at_vec_range"])),
        made_once(),
    ):
        yield
