"""The plans of a compiled graph while it is in use: they follow the memory that there is; kernels stay as they are.

Of the budgets that there can be the least rules: that of the options, what is free now if that is "auto", and what was
found to be too much because an allocation failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from reroll.backends.construct.artifacts import tell
from reroll.backends.construct.budget_allocation import Share, beside_each_other, share_out
from reroll.backends.construct.build import automatic_budget
from reroll.backends.construct.plan import Built, plan
from reroll.backends.runtime.node import RecurrenceModule
from reroll.backends.runtime.undefined_grads import have_own_functions
from reroll.errors import BudgetError, RerollError, ShortageError, warn
from reroll.planning.choose import ALONE
from reroll.program.memory import OuterMemory, predict
from reroll.words.units import nbytes_text

_LESS = 0.7  # of what a plan needs for which memory did not suffice is what the next may need
_MORE = 1.5  # times the bytes that plans were made for have to be free until others are made


class Plans:
    """The recurrences of one graph with their present plans.

    With ``memory_budget="auto"`` plans are made anew at a call where what is free has fallen below what they need, or
    has risen by half above what they were made for, so that they do not change to and fro. After an allocation that
    failed they keep within 0.7 of what they needed then; with an automatic budget until half more is free than then.
    """

    def __init__(self, built: Sequence[Built] = (), *, told: bool = True) -> None:
        self.built = tuple(built)
        own = have_own_functions([each.executable for each in built])
        if told:
            tell(built)
        self.modules = {
            each.name: RecurrenceModule(each.executable, partial(self._shorten, each.name), own) for each in built
        }
        self.automatic = bool(self.built) and self.built[0].options.automatic_budget
        self.budget = self.built[0].beside.budget if self.built else None
        self.most: int | None = None
        self.free_then = 0

    @property
    def needed(self) -> int:
        """Bytes that the present plans are predicted to hold together, with what is beside them."""
        return max(each.needed for each in self.built)

    def placed(self, around: Mapping[str, OuterMemory]) -> list[Built]:
        """The present plans with what is ``around`` each, and with what those before it keep."""
        return beside_each_other([_placed(each, around[each.name]) for each in self.built])

    def follow(self) -> None:
        """Make other plans, before a training call, if the memory that there is asks for it.

        Raises BudgetError if the budget is automatic, and no plan needs as little.
        """
        budget = self._present_budget() if torch.is_grad_enabled() else None
        if budget is None or self.budget == budget:
            return
        if self.budget is not None and self.needed <= budget <= self.budget * _MORE:
            return
        if self.automatic:
            self._replace(_shared_anew(self.built, budget))
        else:
            self._replace([found for each in self.built if (found := _within(each, budget))])
        self.budget = budget

    def _present_budget(self) -> int | None:
        """Bytes that hold in place of the option's, if any do."""
        if not self.automatic:
            return self.most
        free = automatic_budget(self.built[0].executable.recurrence)
        return free if self.most is None or free > _MORE * self.free_then else min(free, self.most)

    def _shorten(self, name: str, half: str, shortage: str) -> None:
        """Replace the plan of a recurrence, for whose ``half`` memory did not suffice, by one that needs less.

        Those of others follow at the next call. Raises ShortageError if none needs less.
        """
        (present,) = (each for each in self.built if each.name == name)
        if self.automatic:
            self.free_then = automatic_budget(present.executable.recurrence)
        where = f"Memory ran out in the {half} of the loop at {present.executable.recurrence.where}"
        what = f"{where} ({shortage.splitlines()[0]}). Its plan, {_described(present)}"
        found = _cheaper(present)
        if found is None:
            others = [cheaper for each in self.built if each.name != name and (cheaper := _cheaper(each))]
            self._keep_within(others)
            raise ShortageError(f"{what}, and none needs less. {_advice(present, half, bool(others))}")
        self._keep_within([found])
        text = f"{what}. It is played again, and from now on, with another, {_described(found)}."
        warn(text)

    def _keep_within(self, found: Sequence[Built]) -> None:
        """Take these plans, and none that need more from now on."""
        budgets = [each.beside.budget for each in found if each.beside.budget is not None]
        self.most = min([*budgets, *([] if self.most is None else [self.most])], default=None)
        self._replace(found)

    def _replace(self, found: Sequence[Built]) -> None:
        tell(found)
        taken = {each.name: each for each in found}
        self.built = tuple(beside_each_other([taken.get(each.name, each) for each in self.built]))
        for each in found:
            self.modules[each.name].executable = each.executable
            if each.executable.compiled.graphs.device is None:
                each.kernels.compiled.graphs.forget()


def _placed(built: Built, around: OuterMemory) -> Built:
    prediction = predict(built.plan.tally, built.demand.needs.within(around))
    return replace(built, plan=replace(built.plan, prediction=prediction), beside=replace(built.beside, around=around))


def fit(placed: Sequence[Built], budget: int) -> bool:
    """Whether there are plans of the same kernels within another budget."""
    with suppress(RerollError):
        return bool(_shared_anew(placed, budget))
    return False


def _shared_anew(built: Sequence[Built], budget: int) -> list[Built]:
    """The plans of the recurrences of a graph within another budget, of the same kernels. Raises BudgetError."""
    if len(built) == 1:
        return [_planned(built[0], budget)]

    def share(each: Built) -> Share:
        alone = replace(each, beside=ALONE)
        return Share([each.choice.segment], each.beside.around, lambda _, nbytes: _planned(alone, nbytes))

    return share_out(list(map(share, built)), built[0].options, budget)


def _planned(built: Built, budget: int) -> Built:
    """The plan of a recurrence within another budget, of the same kernels. Raises BudgetError."""
    beside = replace(built.beside, budget=budget)
    found = plan(built.kernels, built.executable.recurrence, built.options, beside, built)
    found.executable.ledger.gradient_error = built.executable.ledger.gradient_error
    return found


def _cheaper(built: Built) -> Built | None:
    """The plan that needs at most 0.7 of the bytes of the present one, or else the least, if it needs less."""
    return _within(built, int(_LESS * built.needed))


def _within(built: Built, budget: int) -> Built | None:
    """The plan within a budget, or else the one that needs least, if it needs less than the present one; None where
    there is none, which is so too where a schedule of the user's own cannot do with as little."""
    with suppress(RerollError):
        try:
            return _planned(built, budget)
        except BudgetError as error:
            if error.nbytes < built.needed:
                return _planned(built, error.nbytes)
    return None


def _described(built: Built) -> str:
    return f"{built.choice.describe()}, is predicted to hold {nbytes_text(built.plan.prediction.peak)}"


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
