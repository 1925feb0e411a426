"""The verbs: functions from a legal training program to a legal training program with the same results.

Each pass is one file. ``DEFAULT_PASSES`` is the order in which they run unless the user writes another one.
"""

from reroll.passes import compress, merge_replay, offload, prefetch, recompute, save, sparsity, trim
from reroll.registry import Pass, StepPass

DEFAULT_PASSES: tuple[str, ...] = ("sparsity", "save", "recompute", "offload", "compress", "prefetch")

__all__ = [
    "DEFAULT_PASSES",
    "Pass",
    "StepPass",
    "compress",
    "merge_replay",
    "offload",
    "prefetch",
    "recompute",
    "save",
    "sparsity",
    "trim",
]
