"""The proof of a program beside the plain model, on a call's own values, and what is said where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from reroll.backends.construct.stages.proof import OTHERWISE, Proof
from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.observe import holds_history, shown_by
from reroll.errors import ProofError, UnsupportedError, warn

LOG = logging.getLogger(__name__)
Run = Callable[..., Any]
ANEW = "The model is looked at anew for copies of the inputs, such as of expanded ones."
"""Why there is no proof, where the program of a call is not that of its copies."""


class UnsteadyError(UnsupportedError):
    """The model does something else each time it is run."""


def prove_beside(
    model: Callable[..., Any],
    call: Call,
    proof: Proof,
    replay: Callable[[Call, Run], Any],
    departure: Callable[[], str],
    ran: Sequence[FunctionType] = (),
) -> None:
    """Prove the program of a call, before it runs, unless the model holds what has a history, such as a state that an
    earlier call has left: a gradient would go on into that call. ``replay`` makes a call with what runs in place of the
    program; ``ran``: functions that run in the model; ``departure`` says what the model does otherwise in another run
    of the same call. Raises ProofError, and UnsteadyError where no program could be right."""
    if holds_history(model):
        proof.missed = "the model holds a tensor with a history"
        LOG.info("not proved at this call: %s", proof.missed)
        return
    apart, leaves = call.without_history()
    shown = partial(shown_by, model, apart, proof, apart=leaves, ran=ran)
    try:
        proof.prove(lambda: shown(apart.run, plainly=True), lambda run: shown(lambda _: replay(apart, run)))
    except ProofError as error:
        if not (departed := departure()):
            raise
        raise UnsteadyError(
            "The model does something else each time that it is run, though nothing tells these runs apart. "
            f"{departed} A compiled program does what one run did. Take what is another each time (the clock, what a "
            "library counts) before the model is called, and pass a tensor of it."
        ) from error


def say_departed(departed: str, proof: Proof) -> None:
    """Say that a model does something else than when it was looked at, where nobody could see whether it matters."""
    if departed and proof.missed:
        warn(f"{OTHERWISE} {departed} Whether its results are others was not seen, as {proof.missed}.")
