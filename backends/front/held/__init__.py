"""What a model holds: all that can be reached from it, in place of Dynamo's guards.

In: a model and the arguments of a call
Out: a `State` (what was reached, as it was), which can be put back; a key, equal for states in which the same
    operations have the same operands
Nouns: State, Change, Reach (states of one model, call after call), Spaces (where names of code are looked up), Assigned
    (what stood there, to see what a run assigns)
Mind: A state has two parts, and their order is that of the operands of a record: what the model and its arguments hold,
    and what its code names (globals of its functions, attributes of its classes). The second is thousands of objects
    for a model of a large library, so `Reach` walks it once, and at a call compares identities of all that the walk
    read (`_Watched`). What that compares and what a walk reads (`links.py`, `names.py`) must be the same: change both
    together. Nothing with a tensor or an array in it is kept from call to call (it would live too long), but for
    constants of a few bytes.
    How far a walk goes is by who wrote the code (`origin.py`): from the user's functions to modules and classes that
    they name, from installed ones to their globals alone, from torch's and Python's nowhere. Objects of Python's own
    classes are followed all the same: they may hold settings.
    The suite has no libraries: after a change run `benchmarks/doors.py --only Norse Sinabs transformers --again`, too.
"""
