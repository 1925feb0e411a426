"""Loops over the same steps become one, with the row-wise work before and behind them, where that is legal.

In: the loops of a graph (`Capture`), and the graph around them
Out: equal loops and an equal graph; less is held for all steps
Nouns: Total (a sum over all steps, and how a step gives its part), RowSteps (of which steps an output has rows)
Mind: Each pass is legal alone, and in any order: one that finds nothing gives back what it was given.
    Nothing is taken into the step while somebody else reads all rows (`row_analysis.rowwise_outputs`): both would be
    held.
    An input whose gradient is zeros in eager must not have None: a last row alone depends on less than all rows do
    (`gradient_reach`). Sums depend on all rows, so there it cannot happen.
    `drop-dead-rows` comes last: row r of an output that lacks rows is not step r's, so nothing follows its rows
    (`row_analysis.rows_of` gives it none), and passes behind it find nothing there.
    A row of a value may need rows of several outputs: whoever emits one checks which row it is asked for.
    A readout is folded only where that makes what is held for all steps smaller.
    Work outside of the cycle (LayerNorm of `x[t]`) fuses with what reads it: batching it before the loop was measured
    and gives nothing.
"""
