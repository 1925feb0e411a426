"""compiler/schedules."""

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
