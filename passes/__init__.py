"""Passes: functions from a legal program, or a half of a segment, to one with the same results.

In: a Program or the graph of a half (or of one step), and a Context
Out: a Program or graph with the same results; the order of passes is `DEFAULT_PASSES`
Nouns: Pass, HalfPass, StepPass
Mind: Each pass is one file, registered by name with `reroll.register_pass`. A pass is a function, or a class that is
    made without arguments and whose instances are called.
    Passes share nothing but what they are given: no module state, no hidden flag.
    The user may leave out any pass or write another order: each must be legal alone.
"""

from reroll.passes.program import compress, offload, prefetch, recompute, save, trim
from reroll.passes.program import record_facts as sparsity
from reroll.passes.segment import (
    batch_products,
    event_products,
    linear_steps,
    merge_gradients,
    pack_weights,
    split_biases,
)
from reroll.program.registry import HalfPass, Pass, StepPass

DEFAULT_PASSES: tuple[str, ...] = (
    "linear-steps",
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
    "linear_steps",
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
