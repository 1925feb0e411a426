"""Loops over the same steps become one, with the row-wise work before and behind them, where that is legal.

In: an outer graph with recurrences
Out: an equal outer graph with fewer recurrences; less is held for all steps
Nouns: Rows, RowEmitter, StepBuilder
Mind: An operation without a rule in `row_rules.py` mixes steps as far as is known. So a missing rule costs speed, and a
    wrong rule costs gradients: test each rule against the operation itself.
    Dimensions are followed, never sizes compared with the number of steps.
    A readout is folded only where that makes what is held for all steps smaller.
    Work outside of the cycle (LayerNorm of `x[t]`) fuses with what reads it: batching it before the loop was measured
    and gives nothing.
"""
