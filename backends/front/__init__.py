"""reroll.compile: the user's model, compiled once for every number of steps.

In: a model, and where time is or nothing of it (`full/`); at each call arguments of some length T
Out: the model's own results at T, with gradients; a LengthError or refusal before any result otherwise
Nouns: Caller, Front, Entry, token (a short stand-in for a sequence), Family, AtLength; what an attempt ends in: Ran,
    Misfit, Untraced, Refused, Unrecorded, Stale
Mind: Calls of compiled models take turns (`calls/turns.py`) but for what is compiled: a first call sets torch's stance
    and Dynamo's settings, which are global. Another thread's call under them ran uncompiled, and a forward that waits
    for another thread's must not keep that from its turn (`tests/backends/front/calls/test_threads.py`).
    Two compiled models never share a backend object.
    Nothing is traced inside of a run of what Dynamo compiled (`Unwound` with `Untraced` comes first): torch keeps all
    that it holds of a frame in which it fails to compile another call of the same frame. Dynamo holds only a `Handle`
    of an `Entry`; the `Front` owns the entries.
    Kernels in the recorder may change buffers without a new version (batch norm), so `State.restore` compares values.
    The runs that look at a model leave arguments, state and random numbers as they were, and never start a collective.
    A loop over another dimension than `time_dim` is found by two more short runs, where a model does the same number of
    operations at two lengths, and more than 256 (`observe._refuse_other_time`).
    `InTurn.__call__` stays disabled for Dynamo, and its warning has `stacklevel=5` for that frame.
    A family knows the pattern that it was traced for: where a later look finds other numbers of the user's, Dynamo's
    guards do not hold what the model reads, and it is read anew (``Stale``), unless the graph draws these numbers.
    A record comes first: it takes a fraction of Dynamo's time, and `held/keys.py` guards it. Dynamo reads what cannot
    be recorded, with guards of its own. A number that the model counts up at every call makes the front look at the
    model again at every call, as it makes Dynamo compile again.
    What short runs do not tell of a length is recorded at it (`full/`), and never refused before that was tried.
    Short runs that look for a pattern take no more steps than such a record.
    The tokens of a call (9 steps of input) outlive it, held by frames, so their memory is freed before a program runs.
"""
