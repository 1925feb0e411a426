"""reroll: back-propagation through time inside a memory budget, as a torch.compile backend.

``torch.compile(model, backend="reroll", options={...})`` compiles for one length, ``reroll.compile(model, time_dim=0)``
for every length; ``explain`` shows the plan; ``measure`` the cost of one call, ``breakdown`` what its memory is for,
``gradient_error`` what rounded carries do; ``calibrate`` what this machine moves in a second; ``name`` names a value of
a step; ``register_pass`` adds a pass of one's own, ``register_schedule`` a schedule; ``register_with_accelerate`` lets
the Trainer of transformers take the name of the backend.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

from reroll.errors import RerollError, RerollWarning
from reroll.graph.names import name
from reroll.planning.options import Options
from reroll.program.registry import register_pass
from reroll.schedules.named import register_schedule
from reroll.segment.policy import StepValue

if TYPE_CHECKING:
    from reroll.backends.dynamo.trainers import register_with_accelerate as register_with_accelerate
    from reroll.backends.front.compile import compile as compile  # noqa: A004  # as torch.compile
    from reroll.backends.measure.breakdown import breakdown as breakdown
    from reroll.backends.measure.explain import explain as explain
    from reroll.backends.measure.gradient_error import gradient_error as gradient_error
    from reroll.backends.measure.measure import measure as measure
    from reroll.backends.tiers.available import total_memory as total_memory
    from reroll.backends.tiers.calibrate import calibrate as calibrate
    from reroll.passes import DEFAULT_PASSES as DEFAULT_PASSES

__version__ = "0.1.0"
__all__ = [
    "DEFAULT_PASSES",
    "Options",
    "RerollError",
    "RerollWarning",
    "StepValue",
    "breakdown",
    "calibrate",
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
    "DEFAULT_PASSES": "reroll.passes",
    "breakdown": "reroll.backends.measure.breakdown",
    "calibrate": "reroll.backends.tiers.calibrate",
    "compile": "reroll.backends.front.compile",
    "explain": "reroll.backends.measure.explain",
    "gradient_error": "reroll.backends.measure.gradient_error",
    "measure": "reroll.backends.measure.measure",
    "register_with_accelerate": "reroll.backends.dynamo.trainers",
    "total_memory": "reroll.backends.tiers.available",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'reroll' has no attribute {name!r}")
    state = random.getstate()  # rich draws a number of Python's when it is imported
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    finally:
        random.setstate(state)
