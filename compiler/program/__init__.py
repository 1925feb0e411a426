"""The training program of a loop: an fx graph of nine instructions, checked, counted and put in time.

In: a tree of Intervals, a Context, passes by name
Out: a legal Program; what it holds in every tier, what it moves, how long it takes
Nouns: Program, Context, part, Tally, Timeline
Mind: Values die at their last use; there is no `free`. A running carry lives in the register until the next run.
    There are nine instructions. Show that they cannot say it before adding one.
    Equal intervals are one *part*, played by `reverse`. Parts are local: what holds a carry in a tier is spelled out. A
    part holds the carry that it is given until its own last use. `Program.copy(parts=False)` shares parts.
    The verifier runs after every pass, on all parts. `spelled.py` spells a program out for all who read, draw or count
    it; only what counts (tally, memory, verifier) and the runtime read parts.
    Peaks are predictions of what the allocator says: they know neither rounding to 512 bytes, nor cuBLAS's workspaces,
    nor what kernels need inside of a CUDA graph.
    A block that waits to be written is held (`memory._besides`): tiers are built so that this is true.
"""

from reroll.program.context import Context
from reroll.program.program import (
    INSTRUCTIONS,
    Part,
    Program,
    advance,
    backward,
    offload,
    recompute,
    reload,
    reverse,
    save,
    store_all,
    tape,
    turn,
)
from reroll.program.registry import HalfPass, Pass, StepPass, register_pass
from reroll.program.tally import Sizes, Tally
from reroll.program.verifier import check, verify

__all__ = [
    "INSTRUCTIONS",
    "Context",
    "HalfPass",
    "Part",
    "Pass",
    "Program",
    "Sizes",
    "StepPass",
    "Tally",
    "advance",
    "backward",
    "check",
    "offload",
    "recompute",
    "register_pass",
    "reload",
    "reverse",
    "save",
    "store_all",
    "tape",
    "turn",
    "verify",
]
