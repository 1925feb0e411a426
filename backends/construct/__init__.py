"""From a Recurrence to an Executable: segments compiled, budgets shared, plans made and later replaced.

In: the Recurrences of a graph, Options, bytes held around them
Out: for each an Executable with its Plan; a cheaper one where memory runs short
Nouns: Kernels, Built, Needs, Plans
Mind: Shorter segments are compiled only where the estimate says that they run a tenth less, or where nothing fits: so
    more bytes are never slower by more than a tenth (`share._may_be_faster`). On sizes tried they hardly ever pay, as
    tapes and carries share the bytes.
    `Plans` (one for each compiled graph) replaces plans between calls: with `memory_budget="auto"`, and after a failed
    allocation. New plans are made of the same kernels and allocate nothing. A plan made cheaper stays so, for that T.
    Loops of one graph share a budget (`budget_allocation.py`): while one runs, those before it hold what they keep, and
    those behind it nothing. Rungs of the ladder do not depend on the budget, so that the least that is named works.
    Bytes of CUDA graphs count (`bytes.recordings`, an upper bound). Where a budget cannot be met with them, a plan
    without them is made, and forgets them.
    Times are measured on normal numbers, not on zeros (`timing.py`); after a training call they are scaled to its
    clock.
    A loop that speaks with other processes is never timed, planned anew or played again.
    The study shares compiled segments between schedules (`benchmarks/study_points.Shared`) and knows the front from
    inside.
"""
