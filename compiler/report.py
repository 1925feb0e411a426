"""What ``reroll.explain`` gives: the plan of a compiled model, in bytes and steps, to be printed or read."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.text import Text
from torch import fx

from reroll.plan import Choice
from reroll.policy import StepValue
from reroll.prediction import Prediction
from reroll.program import Program
from reroll.recurrence import Recurrence
from reroll.tables import loop_tables, nbytes_text, summary
from reroll.tally import Tally

WIDTH = 100  # columns, where there is no terminal that says its own


@dataclass(frozen=True, slots=True)
class CarryLine:
    """A tensor of the carry: ``nbytes`` of its values, ``kept`` as held under ``codec``, and what is proved of them."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    codec: str
    kept: int
    fact: str


_PARAMETER = re.compile(r"[lL]_\w+?_(?:modules_(\w+?)_)?parameters_(\w+)_")


@dataclass(frozen=True, slots=True)
class EventLine:
    """Products of one kind with operands of ``k`` columns and results of ``n``, in the last call.

    ``kind`` is "product" with ``weight``, or "gradient" of it. Of ``elements`` of the operands ``events`` were not
    zero; of ``calls``, ``by_events`` were few enough.
    """

    kind: str
    weight: str
    k: int
    n: int
    calls: int
    by_events: int
    elements: int
    events: int

    def describe(self) -> str:
        """One line: what it is, the density, and what was chosen."""
        which = f"{'with' if self.kind == 'product' else 'of'} {parameter_name(self.weight) or 'a value'}"
        what = f"{self.kind} {which}, {self.k} x {self.n}"
        if not self.calls:
            return f"{what}: not run yet"
        chosen = f"{self.by_events:,} of {self.calls:,} in the last call by events"
        return f"{what}: {100 * self.events / max(self.elements, 1):.3g} % are not zero, {chosen}"


def parameter_name(name: str) -> str:
    """The name that a parameter has in its module, of Dynamo's name of it; another name as it is."""
    found = _PARAMETER.fullmatch(name)
    return ".".join([*filter(None, (found[1] or "").split("_modules_")), found[2]]) if found else name


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """One recurrence and its plan.

    Bytes: ``saved`` of the tape of ``choice.segment`` steps, ``outputs`` of the outputs of all steps, ``gradients`` of
    the gradients that are added up for operands. ``kept`` is (carries, bytes before, bytes after compression) of all
    calls so far. ``events``: products of spikes, and what was seen of them. ``taped``: the values that the tape of
    a segment keeps, before what is 0 or 1 is packed. ``gradient_error``: what ``reroll.gradient_error`` found last
    of a codec that rounds, relative to the norm of the gradients.
    """

    recurrence: Recurrence
    program: Program
    choice: Choice
    carries: tuple[CarryLine, ...]
    saved: int
    outputs: int
    gradients: int
    tally: Tally
    prediction: Prediction
    lowering: str
    kept: tuple[int, int, int] = (0, 0, 0)
    events: tuple[EventLine, ...] = ()
    taped: tuple[StepValue, ...] = ()
    gradient_error: float | None = None

    @property
    def tape_step(self) -> int:
        """Bytes of the tape of one step."""
        return -(-self.saved // self.choice.segment)

    @property
    def reforward(self) -> float:
        """Steps that are run again, per step."""
        return self.tally.reforward_steps / self.recurrence.steps


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The plan of one graph.

    ``outer`` is the graph around the recurrences. Between forward and backward it holds ``outputs`` and, for its own
    backward, ``outside`` bytes. ``reason`` says why no recurrence was found, ``notes`` what else should be known. Local
    memory does not count inputs, parameters and their gradients.
    """

    loops: tuple[Loop, ...]
    outer: fx.Graph
    outputs: int = 0
    outside: int = 0
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The rewritten graphs: one training program for each recurrence."""
        return tuple(loop.program.graph for loop in self.loops)

    @property
    def graph(self) -> fx.Graph:
        """The rewritten graph of the first recurrence; without one, the graph as it was captured."""
        return self.loops[0].program.graph if self.loops else self.outer

    @property
    def step(self) -> fx.GraphModule | None:
        """The step of the first recurrence."""
        return self.loops[0].recurrence.step if self.loops else None

    @property
    def predicted_peak(self) -> int:
        """Predicted local peak of a training step in bytes, the graph around included.

        Recurrences run one after another and are reversed in the opposite order: while one runs, those before it hold
        what they keep for their backward.
        """
        kept = peak = 0
        for loop in self.loops:
            peak = max(peak, kept + loop.prediction.peak)
            kept += loop.prediction.turned
        return self.outputs + self.outside + peak

    @property
    def remote_peaks(self) -> dict[str, int]:
        """Predicted bytes in each remote tier at its peak, those of all recurrences together."""
        found: dict[str, int] = {}
        for loop in self.loops:
            for tier, nbytes in loop.tally.tier_peaks.items():
                if tier not in ("local", "remote"):
                    found[tier] = found.get(tier, 0) + nbytes
        return found

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The tables as plain text, as wide as the terminal or ``width`` columns."""
        buffer = io.StringIO()
        detected = Console().size.width if Console().is_terminal else WIDTH
        console = Console(file=buffer, width=width or min(detected, 140), force_terminal=False, highlight=False)
        for piece in self._pieces():
            console.print(piece)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: object) -> Iterator[RenderableType]:
        yield from self._pieces()

    def _pieces(self) -> list[RenderableType]:
        notes = [Text(f"Note: {note}") for note in self.notes]
        if not self.loops:
            return [Text(f"No recurrence was found: {self.reason}."), *notes]
        pieces: list[RenderableType] = []
        for loop in self.loops:
            pieces += loop_tables(loop)
        rows = {"outputs of the model": self.outputs, "saved around the recurrences": self.outside}
        return [*pieces, summary(self.predicted_peak, rows, self.remote_peaks), *notes]


__all__ = ["CarryLine", "EventLine", "Loop", "Report", "nbytes_text"]
