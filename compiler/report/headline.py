"""The figures that a report leads with: the peak and the time of a training step beside plain BPTT's, and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reroll.program.timeline import Timeline
from reroll.words.units import nbytes_text, seconds_text

if TYPE_CHECKING:
    from reroll.report.report import Report


@dataclass(frozen=True, slots=True)
class Headline:
    """Of one training step: predicted local ``peak`` in bytes, and the ``parts`` that make it up, by what they are.

    ``plain_peak`` is that of plain BPTT with the same segments. ``seconds`` of the recurrences and ``plain_seconds``
    are None where no costs are known. ``rerun``: steps that are run again, per step.
    """

    peak: int
    plain_peak: int
    seconds: float | None
    plain_seconds: float | None
    rerun: float
    parts: tuple[tuple[str, int], ...]

    def headline(self) -> str:
        """The peak in a few words."""
        if self.peak >= self.plain_peak:
            return f"{nbytes_text(self.peak)} at the peak"
        return f"{nbytes_text(self.peak)} instead of {nbytes_text(self.plain_peak)}"

    def verdict(self) -> str:
        """One sentence: peak and time beside those of keeping all tapes (``store_all``)."""
        peak, plain = nbytes_text(self.peak), nbytes_text(self.plain_peak)
        text = f"A training step is predicted to hold {peak} at its peak, "
        if self.peak < self.plain_peak:
            times = f"{self.plain_peak / self.peak:.3g} times"
            text += f"{times} less than the {plain} of the same segments with all tapes kept"
        else:
            text += f"no less than the same segments with all tapes kept ({plain})"
        if self.seconds is not None and self.plain_seconds:
            ratio = self.seconds / self.plain_seconds
            return f"{text}, and to take {seconds_text(self.seconds)}, {ratio:.2f} times its time."
        again = f"it runs every step {self.rerun:.2f} times again" if self.rerun else "no step runs again"
        return f"{text}; {again}. No costs are known, so no time is predicted."


def figures(report: Report, traces: Sequence[Timeline]) -> Headline:
    """The figures of a report whose recurrences have these traces."""
    plains = [loop.plain() for loop in report.loops]
    timed = bool(traces) and not any(trace.nominal for trace in traces)
    steps = sum(loop.recurrence.steps for loop in report.loops)
    kept = plain = 0
    for loop, each in zip(report.loops, plains, strict=True):
        plain = max(plain, kept + loop.around.reversing + each.peak("local"))
        kept += loop.needs.sizes.of_tape(0, loop.recurrence.steps)
    return Headline(
        peak=report.predicted_peak,
        plain_peak=plain,
        seconds=sum(trace.seconds for trace in traces) if timed else None,
        plain_seconds=sum(trace.seconds for trace in plains) if timed else None,
        rerun=sum(loop.tally.reforward_steps for loop in report.loops) / max(steps, 1),
        parts=tuple((name, nbytes) for name, nbytes in report.parts.items() if nbytes),
    )
