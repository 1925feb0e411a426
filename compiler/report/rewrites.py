"""What each rewrite of a loop changes: memory that is held, and work."""

from __future__ import annotations

from dataclasses import dataclass

from reroll.words.units import nbytes_text

_TOLD = 0.005  # of the work: what is less is not told


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite beside leaving it out, by the graphs of a segment before inductor fuses them.

    ``held``: bytes that a training step holds more with it, or fewer where negative: for pointwise values that are
    fused, at most. ``work``: that of a segment with it, as a multiple of that without, by the arithmetic of products
    and the bytes that are made; None where it is a matter of values.
    ``calls``: the operations of a segment without it and with it, where it changes these.
    ``each``: of what ``held`` is told, if not of a training step. ``used``: whether it is, as one may be the planner's
    choice. ``small``: rows, inner and columns of products that it leaves because they are too small to gain.
    """

    name: str
    held: int
    work: float | None = 1.0
    calls: tuple[int, int] | None = None
    used: bool = True
    each: str = ""
    small: tuple[tuple[int, int, int], ...] = ()

    def describe(self) -> str:
        """One line: what it changes, and whether it is used."""
        told = [] if self.calls is None else [f"{self.calls[0]:,} operations of a segment become {self.calls[1]:,}"]
        where = f" in {self.each}" if self.each else ""
        held = f"{nbytes_text(abs(self.held))} {'more' if self.held > 0 else 'less'} held{where}"
        told += [held] if self.held else []
        told += [f"{self.work:.2f} times the work"] if self.work and abs(self.work - 1) > _TOLD else []
        if self.small:
            sizes = ", ".join(f"{rows} x {inner} with {inner} x {columns}" for rows, inner, columns in self.small)
            told += [f"products of spikes are too small to gain ({sizes})"]
        return f"{self.name}{'' if self.used else ', not used'}: {', '.join(told) or 'no more held, no more work'}"
