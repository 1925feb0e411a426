"""Whether what ``keep`` and ``recompute`` name is there: looked for in all loops of a graph, before any is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reroll.backends.inductor.lower import prepare
from reroll.segment.trace import trace
from reroll.graph.names import show_names
from reroll.options import Options
from reroll.segment.policy import check_texts, forward_values
from reroll.recurrence import Recurrence


def check_policy(recurrences: Sequence[Recurrence], options: Options) -> None:
    """Raise OptionError for a text in ``keep`` or ``recompute`` that is in none of the loops. Traces a step of each."""
    policy = options.policy(" and ".join(each.where for each in recurrences))
    if not any(isinstance(rule, str) for rule in (*policy.keep, *policy.recompute)):
        return
    values = []
    for each in recurrences:
        traced = trace(replace(each, step=show_names(each.step)), 1, decompose=options.lowering == "inductor")
        prepare(traced, options.lowering)
        values += forward_values(traced.graph.graph, traced.outputs)
    check_texts(policy, values)
