"""Every error that reroll raises on purpose. Messages are sentences: where, which rule, what was found, what to do.

``is_shortage`` says what an allocation that failed looks like; ``remedy`` what helps where no file can be opened.
"""

from __future__ import annotations

import difflib
import errno
import sys
import warnings
from collections.abc import Sequence

import torch

_WORDS = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")

_NOT_USERS = ("reroll", "torch", "contextlib", "functools", "threading")  # modules of frames that users did not write


class RerollError(Exception):
    """Base of all errors of this package."""


class OptionError(RerollError, ValueError):
    """An option has an unknown name, a wrong value, or contradicts another one."""


class BudgetError(OptionError):
    """No plan fits the memory budget; ``nbytes`` is the least that was found."""

    nbytes: int = 0


class CaptureError(RerollError):
    """The captured graph holds something that cannot be re-rolled."""


class LengthError(CaptureError):
    """Raised no more, as each length is recorded by itself; the name stays for code that catches it."""


class NoRecurrenceError(CaptureError):
    """No repeating step was found and ``on_no_recurrence="error"`` was asked for."""


class IllegalProgramError(RerollError):
    """A training program breaks a rule of the verifier."""


class MachineError(RerollError, ValueError):
    """A tier, or the seconds of a segment, are such as no machine has; or a machine lacks what it is asked for."""


class PassError(RerollError):
    """A pass is unknown, registered twice, or returned an illegal program."""


class ScheduleError(RerollError):
    """A schedule was registered twice, failed, or gave no tree of intervals."""


class StorageError(RerollError):
    """A tier could not keep or give back a value exactly."""


class UnsupportedError(RerollError):
    """Something outside what a compiled recurrence can do was asked of it."""


class ShortageError(RerollError, torch.OutOfMemoryError):
    """Memory ran out while a recurrence ran, and no plan of it needs less."""


class CompilerMissingError(RerollError):
    """Inductor found no C++ compiler."""


class ReplayMismatchError(RerollError):
    """``verify=True`` found a recomputed value that differs from the forward's."""


class ProofError(RerollError):
    """A compiled program does not give what torch gives on the same values (``proof``)."""


class DifferenceError(RerollError):
    """``reroll.check(..., strict=True)``: a compiled model does not do what the plain one does."""


class RerollWarning(UserWarning):
    """Something was done differently from what the user may expect."""


def warn(text: str) -> None:
    """Give a RerollWarning, at the line of the user's code that led here; Python shows the same one there once."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RerollWarning, stacklevel=level)


def did_you_mean(name: str, valid: Sequence[str], cutoff: float = 0.4) -> str:
    """A question for the valid name that is like an unknown one, and a space; empty if none is so like (0 to 1)."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=cutoff)
    return f"Did you mean {close[0]!r}? " if close else ""


def nearest(name: str, valid: Sequence[str]) -> str:
    """What is said of an unknown name: the valid one that is like it, if there is one, and all of them."""
    return f"{did_you_mean(name, valid)}Valid are: {', '.join(valid)}."


def remedy(error: OSError, usual: str) -> str:
    """What helps after a file could not be opened: the ``usual``, unless this process has too many open."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return usual
    return "Close files that are not needed, or raise their number (ulimit -n)."


def is_shortage(error: Exception) -> bool:
    """Whether an error says that memory could not be allocated; on a CPU torch raises a RuntimeError."""
    if isinstance(error, ShortageError):
        return False
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in _WORDS)
