"""A model as Dynamo reads it, whose values are compared with the plain model's; it runs plainly where Dynamo fails.

Dynamo guards what it has seen a model read. What it does not see (attributes that are set by way of ``__dict__``, what
``functools.lru_cache`` holds) is for it as it was when it read them, in silence. So the model itself runs beside some
calls, and in place of what Dynamo made from the first call on in which values differ. It does so where Dynamo fails by
itself, too, if no function of the model had begun.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reroll.backends.construct.stages.proof import Proof
from reroll.backends.construct.stages.seen import FOLLOWING, SHORT, TOLERANCE, Rounding, Seen, compared, following
from reroll.backends.construct.stages.takeover import is_measured
from reroll.backends.dynamo.failures import failure_of
from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.observe import UpdatedError, shown_by
from reroll.backends.front.python_state.outside import FirstImportError, TakenError
from reroll.backends.front.python_state.ran import Ran
from reroll.backends.front.recorded import Recorded, unheard
from reroll.backends.processes.wrappers import CollectiveError, alone
from reroll.backends.runtime.randomness import random_numbers_kept
from reroll.errors import ProofError, UnsupportedError, warn
from reroll.graph.nested import tensors_of
from reroll.graph.private import any_autocast
from reroll.planning.options import Options

LOG = logging.getLogger(__name__)
Run = Callable[..., Any]
_VALUES = "values alone are compared"
_TOLD = (
    "Dynamo is not asked where a record tells all: print, count and draw from Python's generators outside of the "
    "forward, or count in a tensor."
)


class Reading:
    """Which runs of a model: what Dynamo made of it, or the model itself. calls: so far, by what comes in."""

    def __init__(self, recorded: Recorded, options: Options) -> None:
        self.recorded, self.options = recorded, options
        self.calls, self.plain = Counter[Any](), False

    def runs(self, call: Call, read: Run, ran: Ran) -> Run:
        """What a call runs: ``read``, the model as Dynamo reads it, or the model; ``ran``: functions that run in it.
        Raises ProofError with ``proof="always"`` where they give something else."""
        if not self.plain and self._is_due(call) and (differs := self._difference(call, read, ran)):
            text = (
                "Dynamo reads this model, as a record cannot tell what it does, and what torch.compile makes of it "
                f"does not give what the model gives for this call: {differs}. Nothing was changed by this call. "
                "torch.compile does not see all that the model reads: keep it in attributes that are assigned "
                "(self.name = value), in buffers or in arguments"
            )
            if self.options.proof == "always":
                raise ProofError(f"{text}.")
            warn(f"{text}. The model runs as plain PyTorch from now on.")
            self.plain = True
        return self.recorded.model if self.plain else partial(self._read, read)

    def _read(self, read: Run, *args: Any, **kwargs: Any) -> Any:
        """The model's result as Dynamo reads it, or by itself where Dynamo fails. Raises UnsupportedError where that
        would run a part of it twice, or is not what options ask for."""
        try:
            return read(*args, **kwargs)
        except Exception as error:
            failure = failure_of(error)
            if failure is None:
                raise
            text = (
                "Dynamo reads this model, as a record cannot tell what it does, and fails with an error of its own"
                f"{failure.text}"
            )
            if failure.begun:
                raise UnsupportedError(
                    f"{text}. A part of the model had run, and what it changed stays. {_TOLD}"
                ) from error
            if self.options.on_no_recurrence == "error" or self.options.truncate is not None:
                raise UnsupportedError(f"{text}. {_TOLD}") from error
        result = self.recorded.model(*args, **kwargs)
        self.plain = True
        warn(f"{text}. The model runs as plain PyTorch from now on. {_TOLD}")
        return result

    def _is_due(self, call: Call) -> bool:
        """Count a call; whether the model runs beside it: the 1st, 2nd, 4th ... of those that are alike, or each."""
        if self.options.proof == "never" or is_measured() or not alone():
            return False
        alike = call.sizes(), torch.is_grad_enabled(), getattr(self.recorded.model, "training", None)
        self.calls[alike] += 1
        count = self.calls[alike]
        return self.options.proof == "always" or count & (count - 1) == 0

    def _difference(self, call: Call, read: Run, ran: Ran) -> str:
        """The first value that differs; empty where none does, or where no run beside the call could tell: it would
        write files, say, or draws random numbers, which compiled code may draw in another way."""
        try:
            with unheard():
                return self._first(call, read, ran) if self.recorded.ends(call, ran) else ""
        except (UpdatedError, TakenError, CollectiveError, FirstImportError) as reason:
            LOG.info("not compared with the plain model: %s", reason)
        except Exception:  # noqa: BLE001  # the call itself raises it, if it is no matter of runs beside it
            LOG.debug("not compared with the plain model", exc_info=True)
        return ""

    def _first(self, call: Call, read: Run, ran: Ran) -> str:
        apart, leaves = call.without_history()
        proof = Proof(other=_VALUES, rounding=_rounding(call))
        shown = partial(shown_by, self.recorded.model, apart, proof, apart=leaves, ran=ran.functions)
        plainly = partial(shown, apart.run, plainly=True)
        with random_numbers_kept():
            undrawn = following()
        expected = plainly()
        if expected.others[FOLLOWING] != undrawn:
            LOG.info("not compared with the plain model, which draws random numbers")
            return ""
        found = shown(lambda _: apart.run(read))
        if not _differ(expected, found, proof.rounding) or compared(expected, plainly(), None, proof.rounding)[0]:
            return ""  # or the model gives something else each time
        return _differ(expected, proof.without_noise(plainly, expected, found), proof.rounding)


def _differ(expected: Seen, found: Seen, rounding: Rounding) -> str:
    """The first value that differs, of results and of what is left in attributes."""
    differences, _ = compared(expected, found, None, rounding)
    told = (each for each in differences if each.name in expected.tensors or each.name.startswith("attribute "))
    return str(next(told, ""))


def _rounding(call: Call) -> Rounding:
    """What rounding explains of the numbers of a call."""
    values: list[Tensor] = [each for each in tensors_of((call.args, call.kwargs)) if each.is_floating_point()]
    found = max((TOLERANCE.get(each.dtype, SHORT) for each in values), default=0.0)
    return Rounding(SHORT if any_autocast() else found)
