"""What a model holds: all that can be reached from it, in place of Dynamo's guards.

In: a model and the arguments of a call
Out: a `State` (what was reached, as it was), which can be put back; a key, equal for states in which the same
    operations have the same operands
Nouns: State, Change, Reach (states of one model, call after call), Spaces (where names of code are looked up), Assigned
    (what stood there, to see what a run assigns), Ran (the code that ran in records), Hidden (a state that no attribute
    shows), Again (calls at which the model was looked at anew)
Mind: A state has three parts, and their order is that of the operands of a record: what the model holds, what its
    arguments hold besides, and what the code of both names (globals of its functions, attributes of its classes). The
    last is thousands of objects for a model of a large library. So `Reach` walks the first and the last once, and at a
    call compares identities of all that these walks read (`_Watched`). What that compares and what a walk reads
    (`object_graph.py`, `names.py`) must be the same: change both together. Nothing large that is new at each call may
    be kept from call to call, as it would live too long: tensors that modules hold are known weakly (`_Own`), and where
    something else holds one, the walk is kept only if that one stays.
    How far a walk goes is by who wrote the code (`code_ownership.py`): from the user's functions to modules and classes
    that they name, from installed ones to their globals alone, from torch's and Python's nowhere. Objects of Python's
    own classes are followed all the same: they may hold settings. Of code that ran in a record (`Ran`) all names count,
    in whichever module or class; what they lead to is not followed, as code that matters there has run as well. So a
    key has more words after a record than before, and a record stands under the key that is made after it.
    Objects may lie or raise when they are asked (proxies, mocks): a walk asks for their type (``is_a``), reads
    containers by their own kind (``items_of``), and takes no attribute but from ``__dict__`` and slots.
    The suite has no libraries: after a change run `benchmarks/doors.py --only Norse Sinabs transformers --again`, too.
"""
