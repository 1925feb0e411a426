"""What is done row by row around loops: which values have a row for each step, and one row of them by itself.

In: an outer graph with recurrences
Out: the rows of each value that depends on a recurrence; steps and rows as operations of their own
Nouns: Rows, RowEmitter, StepBuilder
Mind: An operation without a rule in `row_rules.py` mixes steps as far as is known. So a missing rule costs speed, and a
    wrong rule costs gradients: test each rule against the operation itself.
    Dimensions are followed, never sizes compared with the number of steps.
"""
