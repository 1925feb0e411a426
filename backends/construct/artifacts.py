"""What is told of the plans of a graph as they are made: the log, and artifacts for ``TORCH_TRACE``.

``logging`` has a logger for each module, below ``reroll``. INFO: a line for each loop, what was found and chosen.
DEBUG: what was tried for it. ``TORCH_LOGS="+reroll"`` shows all, ``TORCH_LOGS="reroll"`` the first. ``TORCH_TRACE``
names a folder in which torch keeps what tlparse shows; each loop adds its step, its program and its plan.

Private torch API, tried on 2.11 and 2.13: ``torch._logging._internal.trace_structured``, which asks for a text only
where somebody listens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch._logging._internal import trace_structured

from reroll.backends.construct.plan import Built
from reroll.program.spelled import spelled_out
from reroll.words.units import nbytes_text

LOG = logging.getLogger(__name__)


def tell(built: Sequence[Built]) -> None:
    """Tell of the plans of a graph."""
    for each in built:
        LOG.info("%s", _line(each))
        for stage, text in {"step": _step, "program": _program, "plan": _plan}.items():
            artifact(f"reroll_{each.name}_{stage}", partial(text, each))


def artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to what ``TORCH_TRACE`` keeps of the graph that is compiled now."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def _line(built: Built) -> str:
    """A loop, its plan, and what that is predicted to hold."""
    recurrence, again = built.executable.recurrence, built.plan.tally.reforward_steps
    kind = "blocks" if recurrence.blocks else "steps"
    return (
        f"the loop at {recurrence.where}: {recurrence.steps:,} {kind}, {built.choice.describe()}, {again:,} run again, "
        f"a peak of {nbytes_text(built.plan.prediction.peak)} predicted"
    )


def _step(built: Built) -> str:
    """The step that repeats, as code."""
    return str(built.executable.recurrence.step.print_readable(print_output=False))


def _program(built: Built) -> str:
    """The instructions of the training program, one a line."""
    return "\n".join(f"{each.kind:10} {each.name}" for each in spelled_out(built.plan.program))


def _plan(built: Built) -> str:
    """The plan in numbers, as JSON."""
    plan, counted = built.plan, ("local_peak", "tier_peaks", "forward_steps", "remote_writes", "remote_reads")
    told: dict[str, Any] = {
        "where": built.executable.recurrence.where,
        "steps": built.executable.recurrence.steps,
        "schedule": plan.choice.describe(),
        "predicted_peak": plan.prediction.peak,
        **{name: getattr(plan.tally, name) for name in counted},
    }
    return json.dumps(told, indent=1)
