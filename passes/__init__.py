"""Passes: functions from loops, from a half of a segment, or from a legal program, to one with the same results.

In: the loops of a graph; or a Program or the graph of a half (or of one step), and a Context
Out: loops, a Program or a graph with the same results; the order of passes is `DEFAULT_PASSES`
Nouns: LoopPass, StepPass, HalfPass, Pass
Mind: Each pass is one file, registered by name with `reroll.register_pass`. A pass is a function, or a class that is
    made without arguments and whose instances are called.
    Passes share nothing but what they are given: no module state, no hidden flag.
    The user may leave out any pass or write another order: each must be legal alone.
"""

from reroll.passes.loop import (
    drop_dead_rows,
    fold_inputs,
    fold_readouts,
    fold_reductions,
    fuse_loops,
    take_last_rows,
)
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
from reroll.program.registry import HalfPass, LoopPass, Pass, StepPass

DEFAULT_PASSES: tuple[str, ...] = (
    *("fuse-loops", "take-last-rows", "fold-reductions", "fold-readouts", "fold-inputs", "drop-dead-rows"),
    "linear-steps",
    *("merge-gradients", "batch-products", "event-products", "split-biases", "pack-weights"),
    *("sparsity", "save", "recompute", "offload", "compress", "prefetch"),
)

__all__ = [
    "DEFAULT_PASSES",
    "HalfPass",
    "LoopPass",
    "Pass",
    "StepPass",
    "batch_products",
    "compress",
    "drop_dead_rows",
    "event_products",
    "fold_inputs",
    "fold_readouts",
    "fold_reductions",
    "fuse_loops",
    "linear_steps",
    "merge_gradients",
    "offload",
    "pack_weights",
    "prefetch",
    "recompute",
    "save",
    "sparsity",
    "split_biases",
    "take_last_rows",
    "trim",
]
