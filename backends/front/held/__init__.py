"""What a model holds: all that can be reached from it, in place of Dynamo's guards.

In: a model and the arguments of a call
Out: a `State` (what was reached, as it was), which can be put back; a key, equal for states in which the same
    operations have the same operands
Nouns: State, Change, Reach (states of one model, call after call), Names (what a run may assign outside of objects)
Mind: A state has two parts, and their order is that of the operands of a record: what the model and its arguments hold,
    and what its code names (globals of its functions, attributes of its classes). The second is thousands of objects
    for a model of a large library, so `Reach` walks it once, and at a call compares identities of all that the walk
    read (`_Watched`). What that compares and what a walk reads (`links.py`) must be the same: change both together.
    Nothing with a tensor or an array in it is kept from call to call: it would live too long, and its values count.
"""
