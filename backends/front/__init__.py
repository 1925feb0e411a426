"""reroll.compile: the user's model, recorded at the real length of each new call, and rolled.

In: a model, and at each call its arguments
Out: the model's own results, with gradients; what a record does not tell is what the backend makes of it
Nouns: Caller, AtLength, Recorded, Recording, State, Key
Mind: Nothing is inferred from other lengths: a program is made of the model's own run at its length (`full/`).
    A record comes first: it takes a fraction of Dynamo's time, and `python_state/keys.py` guards it. Dynamo reads what
    cannot be recorded, with guards of its own, and from then on all calls. A number that the model counts up at every
    call makes the front look at the model again at every call, as it makes Dynamo compile again.
    Calls of compiled models take turns (`calls/compile_lock.py`) but for what is compiled: a record sets torch's
    stance, which is global. Another thread's call under it ran uncompiled, and a forward that waits for another
    thread's must not keep that from its turn (`tests/backends/front/calls/test_threads.py`).
    Two compiled models never share a backend object.
    Kernels in the recorder may change buffers without a new version (batch norm), so `State.restore` compares values.
    The runs that look at a model leave arguments, state and random numbers as they were, and never start a collective.
    `InTurn.__call__` stays disabled for Dynamo.
    A look never speaks with other processes: what does so inside of the forward is the backend's.
"""
