"""How far apart a loop of inductor's reads and writes, told without a search where that can be read off.

Inductor asks it of every index of every loop, and each time has sympy look for the simplest form of a difference
(0.1 s): for nine steps of a convolutional network that was 17 of 36 s. What is added to an index and does not
hold the variable changes nothing, and so the steps of a segment, which differ in that, ask the same.

Private torch API, tried on 2.11 and 2.13: ``codegen.cpp.stride_at_vec_range`` (index, variable, length of a vector ->
the difference from one value of the variable to the next).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy


def quick(ask: Callable[..., Any]) -> Callable[..., Any]:
    """``stride_at_vec_range``, asked only of what depends on the variable, and not at all where that is linear."""

    def stride(index: Any, variable: sympy.Symbol, length: int | None = None) -> Any:
        if not isinstance(index, sympy.Expr):
            return ask(index, variable, length)
        terms = [term for term in sympy.Add.make_args(index) if term.has(variable)]
        linear = [_coefficient(term, variable) for term in terms]
        if None in linear:
            return ask(sympy.Add(*terms), variable, length)
        return sympy.Add(*linear)

    return stride


def _coefficient(term: sympy.Expr, variable: sympy.Symbol) -> sympy.Expr | None:
    """What a variable is multiplied with in a term that holds it; None if the term is not linear in it."""
    factor, rest = term.as_independent(variable, as_Add=False)
    return factor if rest == variable else None
