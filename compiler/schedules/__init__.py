"""Where carries are kept: a schedule is a function from numbers to a tree of intervals.

In: numbers only (Problem): steps, bytes of a carry and of a tape, the budget, what a tier takes
Out: a tree of Intervals, and what it costs in runs, transfers and bytes
Nouns: Problem, Interval, Machine, Costs
Mind: No graph and no tensor comes in here: every claim can be tested against a formula or a brute-force search.
    A tree does not say where it starts, so equal intervals are one object: count each object once (`counts.py`), and
    never write a position into an Interval.
    A child of an interval may be `taped`: its tape is kept in place of its carry. So the last piece of a run never runs
    twice.
    `counts.py` must agree with `program/tally.py` on the program that the passes write.
    A schedule of one's own enters by `reroll.register_schedule` and is judged by the same checks as ours.
"""

from reroll.schedules.interval import (
    Interval,
    best_chunk,
    best_local_double,
    best_slots,
    double,
    double_merged,
    hierarchical,
    remote,
    standard,
    store_all,
)
from reroll.schedules.machine import Costs, Machine, MachineTier, SegmentSeconds
from reroll.schedules.named import register_schedule, schedule_names, tree
from reroll.schedules.optimal.online import Online
from reroll.schedules.problem import Problem

__all__ = [
    "Costs",
    "Interval",
    "Machine",
    "MachineTier",
    "Online",
    "Problem",
    "SegmentSeconds",
    "best_chunk",
    "best_local_double",
    "best_slots",
    "double",
    "double_merged",
    "hierarchical",
    "register_schedule",
    "remote",
    "schedule_names",
    "standard",
    "store_all",
    "tree",
]
