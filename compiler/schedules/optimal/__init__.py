"""The trees that run the fewest steps again, for memory in slots or bytes, on one tier or more.

In: a number of segments, room for carries and tapes, what moving a carry costs in runs
Out: an optimal or bounded tree, and how many runs it takes
Nouns: OneTier, SlowTier, Slots, Piece, price
Mind: The closed form sum_k (l - N(M, k)) is wrong in bytes: the tape of the last piece shrinks with every carry that is
    kept. `blend.py` states how far it may be from the optimum.
    Each method has an oracle: tables of all lengths (`tabled.py`) and brute force for small T.
    `online.py` (T unknown) has a rule of its own with measured bounds, not the exact rules of Stumm and Walther.
    Time of the planner is kept: T = 100,000 in about a second. Above that are `hrevolve` with thousands of remote
    carries and `revolve` with thousands of slots (about 2 s).
"""
