"""The plans of a compiled graph while it is in use: they follow the memory that there is; kernels stay as they are."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from reroll.backends.build import Built, plan
from reroll.backends.fitting import automatic_budget
from reroll.backends.rolled import Rolled
from reroll.errors import BudgetError, RerollWarning, ShortageError
from reroll.plan import ALONE
from reroll.tables import nbytes_text

_LESS = 0.7  # of what a plan needs for which memory did not suffice is what the next may need
_MORE = 1.5  # times the bytes that plans were made for have to be free until others are made


class Plans:
    """The recurrences of one graph with their present plans.

    With ``memory_budget="auto"`` plans are made anew at a call where what is free has fallen below what they need, or
    has risen by half above what they were made for, so that they do not change to and fro. After an allocation that
    failed they keep within 0.7 of what they needed then.
    """

    def __init__(self, built: Sequence[Built] = ()) -> None:
        self.built = tuple(built)
        self.modules = {each.name: Rolled(each.executable, partial(self._cheaper, each.name)) for each in built}
        self.most: int | None = None
        beside = self.built[0].beside if self.built else ALONE
        self.automatic = bool(self.built) and self.built[0].options.automatic_budget
        self.budget = beside.budget

    @property
    def needed(self) -> int:
        """Bytes that the present plans are predicted to hold together, with what is beside them."""
        return max(each.beside.needed(each.prediction.peak) for each in self.built)

    def follow(self) -> None:
        """Make other plans, before a call, if the memory that there is asks for it.

        Raises BudgetError if the budget is automatic, and no plan needs as little.
        """
        budget = self._present_budget()
        if budget is None or self.budget == budget:
            return
        if self.budget is not None and self.needed <= budget <= self.budget * _MORE:
            return
        most = budget if self.automatic else self.needed
        for each in [_within(each, budget, most) for each in self.built]:
            self._replace(each)
        self.budget = budget

    def _present_budget(self) -> int | None:
        """Bytes that hold in place of the option's, if any do."""
        if not self.automatic:
            return self.most
        free = automatic_budget(self.built[0].executable.recurrence)
        return free if self.most is None else min(free, self.most)

    def _cheaper(self, name: str, half: str, shortage: str) -> None:
        """Replace the plan of a recurrence for whose ``half`` memory did not suffice, and those of others from the next
        call on. Raises ShortageError if none needs less."""
        (present,) = (each for each in self.built if each.name == name)
        needed = present.beside.needed(present.prediction.peak)
        where = f"Memory ran out in the {half} of the loop at {present.executable.recurrence.where}"
        what = f"{where} ({shortage.splitlines()[0]}). Its plan, {_described(present)}"
        try:
            found = _within(present, int(_LESS * needed), needed - 1)
        except BudgetError:
            others = self._less_for_others(name)
            raise ShortageError(f"{what}, and none needs less. {_advice(present, half, others)}") from None
        self.most = found.beside.budget
        self._replace(found)
        text = f"{what}. It is played again, and from now on, with another, {_described(found)}."
        warnings.warn(text, RerollWarning, stacklevel=2)

    def _replace(self, found: Built) -> None:
        self.built = tuple(found if each.name == found.name else each for each in self.built)
        self.modules[found.name].executable = found.executable

    def _less_for_others(self, name: str) -> bool:
        """Cheaper plans, from the next call on, for the recurrences that hold theirs while this one runs; whether there
        are any."""
        cheaper = []
        for each in self.built:
            needed = each.beside.needed(each.prediction.peak)
            with suppress(BudgetError):
                cheaper += [_within(each, int(_LESS * needed), needed - 1)] if each.name != name else []
        for found in cheaper:
            self.most = min(
                self.most or found.beside.needed(found.prediction.peak), found.beside.needed(found.prediction.peak)
            )
            self._replace(found)
        return bool(cheaper)


def _planned(built: Built, budget: int) -> Built:
    """The plan of a recurrence within another budget, of the same kernels. Raises BudgetError."""
    beside = replace(built.beside, budget=budget)
    found = plan(built.kernels, built.executable.recurrence, built.options, beside, built.needs)
    found.executable.ledger.gradient_error = built.executable.ledger.gradient_error
    return found


def _within(built: Built, budget: int, most: int) -> Built:
    """The plan within a budget, or else the one that needs least, if it is within ``most``. Raises BudgetError."""
    try:
        return _planned(built, budget)
    except BudgetError as error:
        if error.nbytes > most:
            raise
        return _planned(built, error.nbytes)


def _described(built: Built) -> str:
    return f"{built.choice.describe()}, is predicted to hold {nbytes_text(built.prediction.peak)}"


def _advice(built: Built, half: str, others: bool) -> str:
    ways = ["Free memory", "use a smaller batch"]
    ways += [f"compile shorter segments than segment={built.choice.segment}"] if built.choice.segment > 1 else []
    ways += [f"use schedule='auto' in place of {built.options.schedule!r}"] if built.options.schedule != "auto" else []
    advice = f"{', '.join(ways[:-1])} or {ways[-1]}."
    if others:
        advice = "Other loops of the model, which hold memory meanwhile, have cheaper plans from now on: call it again."
    if half == "backward":
        advice += (
            " No gradient of the loop was handed on, but what comes after the loop may have its own: zero all before "
            "you go on."
        )
    return advice
