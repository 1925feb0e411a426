"""What runs a program at a call, and what it has to show before it does: eager segments, then compiled ones.

In: what makes a program by some options, and what torch runs in its place
Out: the program of a call; a ProofError where it is not what torch runs
Nouns: Takeover, Proof, Seen
Mind: What runs at a call depends on the calls before it alone, never on how fast a compiler was or what a cache holds:
    two runs of a script have the same bits, and all processes of a group change at the same call.
    A first call that was taken is never refused later: where compiled segments cannot be made, eager ones stay, which
    is said.
    The reference of a proof is what the user wrote, run by torch, never what was captured of it.
"""
