"""What ``reroll.explain`` gives: the plan of a compiled model, in bytes and steps, to be printed or read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text
from torch import fx

from reroll.planning.alternative import Alternative
from reroll.planning.choice import Choice
from reroll.planning.options import Options
from reroll.planning.plan import Plan
from reroll.planning.truncation import Cuts
from reroll.program.memory import Needs, OuterMemory, Prediction
from reroll.program.program import Program, store_all
from reroll.program.tally import Tally
from reroll.program.timeline import Timeline, trace
from reroll.recurrence import Capture, Recurrence
from reroll.report.by_formula import ByFormula, by_formula
from reroll.report.export import as_json, chrome_trace
from reroll.report.page.page import framed, page
from reroll.report.plots import plot
from reroll.report.repro.files import save, write_benchmark, write_repro
from reroll.report.rewrites import Rewrite
from reroll.report.tables import loop_tables, stage_lines, summary
from reroll.schedules.machine import Costs
from reroll.segment.cut.policy import StepValue
from reroll.segment.ops import EventCount
from reroll.words.units import nbytes_text, seconds_text

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


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """One recurrence and its plan.

    ``plan``: what was chosen, its program, and what that takes. Bytes: ``saved`` of the tape of ``choice.segment``
    steps, ``outputs`` of the outputs of all steps, ``around`` what is held outside of the recurrence,
    ``gradients`` of the gradients that are added up for operands.
    ``kept`` is (carries, bytes before, bytes after compression) of all calls so far. ``events``: products of spikes,
    and what was seen of them. ``needs`` and ``costs``: bytes and seconds of its segments (no costs: no machine was
    calibrated). ``why`` the plan was chosen, among ``alternatives``, under a ``budget`` in bytes for this recurrence.
    ``measured_peak`` and ``measured_seconds`` of a training step, once there was one.
    ``taped``: the values that the tape of a segment keeps, before what is 0 or 1 is packed. ``gradient_error``: what
    ``reroll.gradient_error`` found last of a codec that rounds, relative to the norm of the gradients.
    ``prefetched``: whether blocks are read one chunk ahead. ``cuts``: where no gradient of a carry passes.
    ``rewriting`` says what its rewrites hold and take. ``options`` are those of its compilation. ``captured`` has the
    step as it was found, before passes; ``halves`` are the graphs of its longest segment, "forward" and "backward".
    """

    recurrence: Recurrence
    plan: Plan
    carries: tuple[CarryLine, ...]
    saved: int
    outputs: int
    around: OuterMemory
    gradients: int
    needs: Needs
    lowering: str
    kept: tuple[int, int, int] = (0, 0, 0)
    events: tuple[EventCount, ...] = ()
    costs: Costs | None = None
    why: str = ""
    alternatives: tuple[Alternative, ...] = ()
    budget: int | None = None
    measured_peak: int | None = None
    measured_seconds: float | None = None
    taped: tuple[StepValue, ...] = ()
    gradient_error: float | None = None
    prefetched: bool = True
    cuts: Cuts | None = None
    rewriting: Callable[[], tuple[Rewrite, ...]] = tuple
    options: Options = field(default_factory=Options)
    captured: Recurrence | None = None
    halves: Mapping[str, fx.GraphModule] = field(default_factory=dict)

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """What each rewrite of its segments holds and takes; found when it is asked for."""
        return self.rewriting()

    @property
    def choice(self) -> Choice:
        """The schedule with its numbers, in steps and bytes."""
        return self.plan.choice

    @property
    def program(self) -> Program:
        """The training program."""
        return self.plan.program

    @property
    def tally(self) -> Tally:
        """What the program holds, moves and runs."""
        return self.plan.tally

    @property
    def prediction(self) -> Prediction:
        """The local peak of the program, in bytes."""
        return self.plan.prediction

    @property
    def outer_bytes(self) -> int:
        """Bytes around the recurrence at its own peak."""
        return self.around.beside(self.prediction)

    @property
    def tape_step(self) -> int:
        """Bytes of the tape of one step."""
        return -(-self.saved // self.choice.segment)

    @property
    def reforward(self) -> float:
        """Steps that are run again, per step."""
        return self.tally.reforward_steps / self.recurrence.steps

    def by_formula(self) -> ByFormula:
        """What the formulas of the schedule say, with the numbers of this plan."""
        return by_formula(self)

    def trace(self) -> Timeline:
        """The training program in time."""
        return trace(self.program, self.needs, self.costs)

    def plain(self) -> Timeline:
        """Plain BPTT with the same segments in time: every tape is kept, and no step runs again."""
        return trace(store_all(self.program.steps, self.program.segment), self.needs, self.costs)

    def __repr__(self) -> str:
        return f"<reroll loop: {self._line()}>"

    def _line(self) -> str:
        """The loop and its plan in a few words."""
        return f"{self.recurrence.steps:,} steps, {self.choice.schedule}, segments of {self.choice.segment}"


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The plan of one graph.

    ``outer`` is the graph around the recurrences. Between forward and backward it holds ``outputs`` and, for its own
    backward, ``outside`` bytes. ``reason`` says why no recurrence was found, ``notes`` what else should be known. Local
    memory does not count inputs, parameters and their gradients. ``measured_peak`` (bytes) and ``measured_seconds`` are
    those of a whole training step, once there was one. ``proved``: what was compared with plain PyTorch, or why nothing
    was; empty without a proof. ``others``: the plans of the other graphs into which Dynamo has cut the model, in the
    order in which they ran. ``stages``: the loops as they were ``captured``, and behind each pass on loops that changed
    them, by its name, with the graph around them.
    """

    loops: tuple[Loop, ...]
    outer: fx.Graph
    outputs: int = 0
    outside: int = 0
    reason: str = ""
    notes: tuple[str, ...] = ()
    measured_peak: int | None = None
    measured_seconds: float | None = None
    proved: str = ""
    others: tuple[Report, ...] = ()
    stages: Mapping[str, Capture] = field(default_factory=dict)

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The rewritten graphs: for each recurrence its training program, then the parts of that program."""
        return tuple(graph for loop in self.loops for graph in loop.program.graphs)

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
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """What is held at the predicted peak, in bytes by name."""
        found, kept = dict[str, int](), 0
        for loop in self.loops:
            peak, around = loop.around.at_peak(loop.prediction)
            outputs = min(self.outputs, around)
            here = {
                "carries and tapes": peak.held,
                "the running segment": peak.scratch,
                "kept by other recurrences": kept,
                "outputs of the model": outputs,
                "held around the recurrences": around - outputs,
            }
            found = max(found, here, key=lambda parts: sum(parts.values()))
            kept += loop.prediction.turned
        return found

    @property
    def remote_peaks(self) -> dict[str, int]:
        """Predicted bytes in each remote tier at its peak, those of all recurrences together."""
        found: dict[str, int] = {}
        for loop in self.loops:
            for tier, nbytes in loop.tally.tier_peaks.items():
                found[tier] = found.get(tier, 0) + nbytes
        return found

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        loops = "; ".join(loop._line() for loop in self.loops) or "no recurrence"
        more = f"; {len(self.others)} more graphs" if self.others else ""
        return f"<reroll report: {loops}; predicted peak {nbytes_text(self.predicted_peak)}{more}>"

    def text(self, width: int | None = None) -> str:
        """The tables as plain text, as wide as the terminal or ``width`` columns."""
        buffer = io.StringIO()
        detected = Console().size.width if Console().is_terminal else WIDTH
        console = Console(file=buffer, width=width or min(detected, 140), force_terminal=False, highlight=False)
        for piece in self._pieces():
            console.print(piece)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())

    def save_html(self, path: str | Path) -> None:
        """Write all of this as one page that loads nothing: memory and schedule over time, plans, carries, graphs."""
        Path(path).write_text(page(self), "utf-8")

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        return framed(self)

    def plot(self, path: str | Path) -> None:
        """Write a picture: memory of each tier, the schedule, the alternatives. The ending of ``path`` is the format.

        Raises UnsupportedError where matplotlib is not installed, or no recurrence was found.
        """
        plot(self, path)

    def save_trace(self, path: str | Path) -> None:
        """Write a trace in Chrome's format, for ui.perfetto.dev: segments, transfers, and the memory of each tier.

        A process for each recurrence, each from time zero. Where no costs are known 1 ms stands for one forward step.
        Long programs are summed up: at most about 20,000 events of a track, and no peak is lost. Raises
        UnsupportedError if no recurrence was found.
        """
        Path(path).write_text(json.dumps(chrome_trace(self)), "utf-8")

    def write_repro(self, path: str | Path) -> None:
        """Write a file that runs alone, for a bug report: the loops as code, trained by reroll and in eager PyTorch.

        Each loop is a module: its step as operations, with the backward of custom functions; parameters and inputs
        of the recorded shapes, dtypes and layouts; the options; versions; a seed. No value of a tensor is written, and
        nothing of what is around the loops. ``python repro.py`` exits with 1 where anything differs. Raises
        UnsupportedError if no recurrence was found, or a step or an option holds what code cannot say: an operation or
        object of the user's, a function as a rule of ``keep``; with ``truncate``, whose gradients are not autograd's.
        """
        write_repro(self, Path(path))

    def write_benchmark(self, path: str | Path) -> None:
        """Write a file that runs alone: the loops in eager PyTorch, by ``torch.compile`` and by reroll, side by side.

        It prints CPU seconds of a training step, in turns, local peaks in bytes, and how far gradients are off. What is
        written, and what is raised, is as for ``write_repro``.
        """
        write_benchmark(self, Path(path))

    def save(self, folder: str | Path) -> None:
        """Write every stage into a folder, which is made: as text, JSON and HTML, and graphs as Python that runs.

        ``report.txt``, ``.json`` and ``.html``; ``versions.json``; the graph around the loops, ``outer.txt``; of each
        loop ``_options.json``, ``_plan.json``, ``_program.txt``, and on random values ``_step.py``, ``_forward.py`` and
        ``_backward.py`` of a segment, with ``_step_rewritten.py`` where passes changed the step; ``repro.py`` and
        ``bench.py``, or why they were refused. The report names files and lines of the model's code.
        """
        save(self, Path(folder))

    def to_json(self, most: int = 2_000) -> dict[str, Any]:
        """Everything as dicts, lists, texts and numbers; no list is longer than about ``most``.

        Names of figures end in their unit; None is what is not known. Of the training step: ``predicted_peak_bytes``
        and the ``parts_bytes`` that make it up; ``plain_peak_bytes`` of plain BPTT with the same segments;
        ``remote_peaks_bytes``, ``outputs_bytes``, ``outside_bytes``; ``predicted_seconds``, ``plain_seconds``,
        ``measured_peak_bytes``, ``measured_seconds``; ``proved``, ``reason``, ``notes``, ``outer_graph``; ``stages``, a
        line each; ``others``, the same of the other graphs of the model; ``reroll``, the version.

        Of each of ``recurrences``: ``name``, ``where``, ``steps``, the iterations ``left`` beside them, its ``plan``;
        ``budget_bytes``; ``peak_bytes`` reached at ``peak_at``, of which ``held_bytes`` are carries and tapes and
        ``scratch_bytes`` the rest; ``turned_bytes`` between forward and backward; ``tier_peaks_bytes``; ``tape_bytes``
        of a segment; ``gradients_bytes`` that are added up; ``seconds``; ``rerun_steps``, ``depth`` (how often a step
        runs again); ``remote_writes``, ``remote_reads``; ``kept`` so far; ``carries``, ``event_products``,
        ``rewrites``, ``alternatives``; ``formulas``: the ``lines``, ``letters`` and ``note`` of ``Loop.by_formula``;
        ``trace``: columns of instructions, or of bins of equal time with their most; the nodes of the ``step``; the
        ``program``: its first and last rows, and how many are left out.
        """
        return as_json(self, most)

    def __rich_console__(self, console: Console, options: object) -> Iterator[RenderableType]:
        yield from self._pieces()

    def _pieces(self) -> list[RenderableType]:
        pieces = self._own_pieces()
        for at, other in enumerate(self.others, 1):
            pieces += [
                Text(f"\nOther graph {at} of {len(self.others)} into which Dynamo cut the model:"),
                *other._own_pieces(),
            ]
        return pieces

    def _own_pieces(self) -> list[RenderableType]:
        notes = [Text(f"Note: {note}") for note in self.notes]
        if not self.loops:
            return [Text(f"No recurrence was found: {self.reason}."), *notes]
        pieces: list[RenderableType] = []
        for loop in self.loops:
            pieces += loop_tables(loop)
        if self.measured_seconds is not None:
            notes.insert(0, Text(f"measured time of a training step: {seconds_text(self.measured_seconds)}"))
        notes = [*map(Text, stage_lines(self.stages)), *notes]
        if self.proved:
            notes.insert(0, Text(f"proved: {self.proved}"))
        return [*pieces, summary(self.predicted_peak, self.parts, self.remote_peaks, self.measured_peak), *notes]


__all__ = ["CarryLine", "Loop", "Report", "nbytes_text"]
