"""compiler/program."""

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
