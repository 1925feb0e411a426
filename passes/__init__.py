"""The verbs: functions from a legal training program to a legal training program with the same results.

Each pass is one file. ``DEFAULT_PASSES`` is the order in which they run unless the user writes another one.
"""

from reroll.passes.program import compress, offload, prefetch, recompute, save, trim
from reroll.passes.program import record_facts as sparsity
from reroll.passes.segment import batch_products, event_products, merge_gradients, pack_weights, split_biases
from reroll.program.registry import HalfPass, Pass, StepPass

DEFAULT_PASSES: tuple[str, ...] = (
    *("merge-gradients", "batch-products", "event-products", "split-biases", "pack-weights"),
    *("sparsity", "save", "recompute", "offload", "compress", "prefetch"),
)

__all__ = [
    "DEFAULT_PASSES",
    "HalfPass",
    "Pass",
    "StepPass",
    "batch_products",
    "compress",
    "event_products",
    "merge_gradients",
    "offload",
    "pack_weights",
    "prefetch",
    "recompute",
    "save",
    "sparsity",
    "split_biases",
    "trim",
]
