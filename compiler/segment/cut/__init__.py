"""Where a joint graph is cut: what a forward saves for its backward, and what the backward makes again.

In: the joint graph of a segment, and what the user asked to keep or to recompute
Out: its two halves; a thinner tape with a backward of its own; a forward in two, of which one makes the tape
Nouns: Cut, Policy, Thin, InTwo
Mind: Comparisons and roundings are never recomputed in a backward (`Operation.decides`): a spike must be one
    decision. What only the backward makes of a value to be recomputed may not be saved in its stead (`_with_copies`).
    With the option `replay` the min-cut has two stages (`partition._replayed`): spikes in bits are what is saved, and
    products are repeated from them. Ternary spikes by `sign` or rounding are not packed, so not replayed; a difference
    of two spikes is.
    What a backward makes again comes right before its first use where torch runs it (`late.py`): a joint graph would
    have all of it at the beginning, beside the whole tape.
    There is one forward, whatever its tape: a thin tape is a part of the whole one, so every run of a segment calls the
    same kernels. What a backward decides by is never on a thin tape's way (`partition.decided_by`).
"""
