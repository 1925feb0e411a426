"""reroll: back-propagation through time inside a memory budget, as a torch.compile backend.

``reroll.compile(model, ...)`` records the model and rolls its loops, ``torch.compile(model, backend="reroll",
options={...})`` has Dynamo read it; ``explain`` shows the plan; ``check`` compares a call with the plain model's;
``measure`` gives the cost of one call, ``breakdown`` what its memory is for, ``gradient_error`` what rounded carries
do; ``calibrate`` what this machine moves in a second; ``cache_info`` what is kept on disk; ``name`` names a value of a
step; ``register_pass`` adds a pass of one's own, ``register_schedule`` a schedule; ``register_with_accelerate`` lets
the Trainer of transformers take the name of the backend.

What these take and give: ``Options``; a ``Report`` of ``Plan`` s; a pass maps a ``Program`` under a ``Context``, a
schedule a ``Problem`` to a tree of ``Interval`` s; ``StepValue`` is what ``keep`` and ``recompute`` are asked about.
Further doors: ``reroll.program`` (the instructions), ``reroll.schedules`` and ``reroll.formulas``.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator as _Iterator
from contextlib import contextmanager as _contextmanager
from typing import TYPE_CHECKING, Any

from reroll.backends.progress import python_random_kept as _python_random_kept
from reroll.errors import (
    BudgetError,
    CaptureError,
    CompilerMissingError,
    DifferenceError,
    IllegalProgramError,
    MachineError,
    NoRecurrenceError,
    OptionError,
    PassError,
    ProofError,
    ReplayMismatchError,
    RerollError,
    RerollWarning,
    ScheduleError,
    ShortageError,
    StorageError,
    UnsupportedError,
)
from reroll.graph.names import name
from reroll.planning.options import Options
from reroll.program.context import Context
from reroll.program.program import Program
from reroll.program.registry import register_pass
from reroll.schedules.interval import Interval
from reroll.schedules.named import register_schedule
from reroll.schedules.problem import Problem
from reroll.segment.cut.policy import StepValue

if TYPE_CHECKING:
    from reroll.backends.cache.info import CacheInfo as CacheInfo
    from reroll.backends.cache.info import cache_info as cache_info
    from reroll.backends.dynamo.trainers import register_with_accelerate as register_with_accelerate
    from reroll.backends.front.compile import compile as compile  # noqa: A004  # as torch.compile
    from reroll.backends.measure.breakdown import breakdown as breakdown
    from reroll.backends.measure.check import check as check
    from reroll.backends.measure.doctor import doctor as doctor
    from reroll.backends.measure.explain import explain as explain
    from reroll.backends.measure.gradient_error import gradient_error as gradient_error
    from reroll.backends.measure.measure import measure as measure
    from reroll.backends.tiers.available import total_memory as total_memory
    from reroll.backends.tiers.calibrate import calibrate as calibrate
    from reroll.passes import DEFAULT_PASSES as DEFAULT_PASSES
    from reroll.planning.plan import Plan as Plan
    from reroll.report.report import Report as Report

__version__ = "0.2.0"
__all__ = [
    "DEFAULT_PASSES",
    "BudgetError",
    "CacheInfo",
    "CaptureError",
    "CompilerMissingError",
    "Context",
    "DifferenceError",
    "IllegalProgramError",
    "Interval",
    "MachineError",
    "NoRecurrenceError",
    "OptionError",
    "Options",
    "PassError",
    "Plan",
    "Problem",
    "Program",
    "ProofError",
    "ReplayMismatchError",
    "Report",
    "RerollError",
    "RerollWarning",
    "ScheduleError",
    "ShortageError",
    "StepValue",
    "StorageError",
    "UnsupportedError",
    "breakdown",
    "cache_info",
    "calibrate",
    "check",
    "compile",
    "explain",
    "gradient_error",
    "measure",
    "name",
    "register_pass",
    "register_schedule",
    "register_with_accelerate",
]

_LAZY = {
    "CacheInfo": "reroll.backends.cache.info",
    "DEFAULT_PASSES": "reroll.passes",
    "Plan": "reroll.planning.plan",
    "Report": "reroll.report.report",
    "breakdown": "reroll.backends.measure.breakdown",
    "cache_info": "reroll.backends.cache.info",
    "calibrate": "reroll.backends.tiers.calibrate",
    "check": "reroll.backends.measure.check",
    "compile": "reroll.backends.front.compile",
    "doctor": "reroll.backends.measure.doctor",
    "explain": "reroll.backends.measure.explain",
    "gradient_error": "reroll.backends.measure.gradient_error",
    "measure": "reroll.backends.measure.measure",
    "register_with_accelerate": "reroll.backends.dynamo.trainers",
    "total_memory": "reroll.backends.tiers.available",
}
"""Where the names are that load much: they are loaded when they are asked for."""
_DOORS = ("formulas", "program", "schedules")
_MANY = 50_000


@_contextmanager
def _collected_once() -> _Iterator[None]:
    """Python's cycle collector waits inside. Where more than ``_MANY`` objects were made, it looks at all of them once
    behind that, in place of several times inside and once more in the first call."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        made = gc.get_count()[0]
        if enabled:
            gc.enable()
        if enabled and made > _MANY:
            gc.collect()


if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name == "formulas":  # a door that loads sympy
            return importlib.import_module("reroll.formulas")
        if name not in _LAZY:
            raise AttributeError(f"module 'reroll' has no attribute {name!r}")
        with _python_random_kept(), _collected_once():
            return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *_DOORS})
