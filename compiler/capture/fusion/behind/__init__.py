"""What is done behind a loop with the outputs of all its steps becomes part of its step, where less is held then.

In: an outer graph with recurrences, whose tensors have examples
Out: an equal outer graph: totals are carries (`add_up`), last rows come from last carries (`take_last`), readouts are
    outputs (`fold_readouts`), outputs have only the rows that are read (`take_rows`)
Nouns: Total (a sum over all steps, and how a step gives its part), RowSteps (of which steps an output has rows)
Mind: Nothing is taken into the step while somebody else reads all rows (`row_analysis.unheld`): both would be held.
    An input whose gradient is zeros in eager must not have None: a last row alone depends on less than all rows do
    (`flows`). Sums depend on all rows, so there it cannot happen.
    `take_rows` comes last: row r of an output that lacks rows is not step r's, so nothing may follow its rows
    (`row_analysis.rows_of` gives it none). What it decides may not depend on the number of steps, as short captures are
    compared: a slice with an end stays, and numbers that it writes are affine in that number.
    A row of a value may need rows of several outputs: whoever emits one checks which row it is asked for.
"""
