"""Loops over the same steps become one, with the row-wise work before and behind them, where that is legal.

In: the loops of a graph (`Capture`), and the graph around them
Out: equal loops and an equal graph; less is held for all steps
Nouns: Total
Mind: Each pass is legal alone, and in any order: one that finds nothing gives back what it was given.
    A readout is folded only where that makes what is held for all steps smaller.
    Work outside of the cycle (LayerNorm of `x[t]`) fuses with what reads it: batching it before the loop was measured
    and gives nothing.
"""
