"""k steps of which the linear carries are done together, and all else one after another.

A step is cut by what depends on what: nodes of level 0 depend on no linear carry, those of level 1 on what is read of
carries whose factors are of level 0, and so on. All steps of a level are run before any of the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from reroll.segment.linear.cores import Core, needed, nexts
from reroll.segment.linear.matrices import Chunk, Values

LINEAR = "linear steps"  # in the meta of a step whose linear carries are to be done together


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """In which order nodes of a step run: ``nodes`` and ``cores`` of each level."""

    nodes: Sequence[Sequence[fx.Node]]
    cores: Sequence[Sequence[Core]]

    @classmethod
    def of(cls, graph: fx.Graph, carries: int, cores: Sequence[Core]) -> Schedule:
        """The order of a step with linear carries."""
        run, levels = needed(graph, cores), _levels(graph, carries, cores)
        top = 1 + max([*(levels[node] for node in run), *(_level(core, levels) for core in cores)])
        nodes = [[node for node in graph.nodes if node in run and levels[node] == level] for level in range(top)]
        return cls(nodes, [[core for core in cores if _level(core, levels) == level] for level in range(top)])


def _levels(graph: fx.Graph, carries: int, cores: Sequence[Core]) -> dict[fx.Node, int]:
    """The level of each node: that of a carry is the level of what it becomes."""
    placeholders, after = graph.find_nodes(op="placeholder"), nexts(graph)
    levels = dict.fromkeys(graph.nodes, 0)
    becomes = dict[fx.Node, Any](zip(placeholders[:carries], after, strict=False))
    becomes |= {placeholders[core.carry]: None for core in cores}  # what is formed of it is not run
    read = {node: core for core in cores for node in core.readouts}
    before: dict[fx.Node, int] = {}
    while levels != before:
        before = dict(levels)
        for node in graph.nodes:
            if node in read:
                levels[node] = 1 + _level(read[node], levels)
            elif node.op == "placeholder":
                value = becomes.get(node)
                levels[node] = levels[value] if isinstance(value, fx.Node) else 0
            else:
                levels[node] = max((levels[source] for source in node.all_input_nodes), default=0)
    return levels


def _level(core: Core, levels: Mapping[fx.Node, int]) -> int:
    return max((levels[source] for source in core.sources), default=0)


def run_steps(
    step: fx.GraphModule, cores: Sequence[Core], carries: Sequence[Tensor], reads: Sequence[Sequence[Any]]
) -> tuple[list[Tensor], list[list[Any]]]:
    """The last carries and of each step what it gives besides, of the carries before and what each step reads."""
    run = _Run(step, cores, carries, reads)
    return run.result()


class _Run:
    """One run of some steps."""

    def __init__(
        self, step: fx.GraphModule, cores: Sequence[Core], carries: Sequence[Tensor], reads: Sequence[Sequence[Any]]
    ) -> None:
        self.graph, self.carries, self.after = step.graph, list(carries), nexts(step.graph)
        placeholders = step.graph.find_nodes(op="placeholder")
        self.places = {node: number for number, node in enumerate(placeholders[: len(carries)])}
        own = placeholders[len(carries) :]
        self.runs = [fx.Interpreter(step, garbage_collect_values=False) for _ in reads]
        for run, read in zip(self.runs, reads, strict=True):
            run.env = dict(zip(own, read, strict=True))
        self.schedule = Schedule.of(step.graph, len(carries), cores)
        self.last: dict[int, Tensor] = {}

    def result(self) -> tuple[list[Tensor], list[list[Any]]]:
        """Runs all levels."""
        for nodes, cores in zip(self.schedule.nodes, self.schedule.cores, strict=True):
            for t in range(len(self.runs)):
                self._step(t, nodes)
            for core in cores:
                self._core(core)
        ends = [self.last.get(number, self._source_at(-1, number)) for number in range(len(self.carries))]
        outputs = range(len(self.carries), len(self.after))
        ys = [[self._source_at(t, number) for number in outputs] for t in range(len(self.runs))]
        return ends, ys

    def _source_at(self, t: int, number: int) -> Any:
        value = self.after[number]
        return self.runs[t].env.get(value) if isinstance(value, fx.Node) else value

    def _step(self, t: int, nodes: Sequence[fx.Node]) -> None:
        run = self.runs[t]
        for node in nodes:
            if node in self.places:
                number = self.places[node]
                run.env[node] = self._source_at(t - 1, number) if t else self.carries[number]
            elif node not in run.env:
                run.env[node] = run.run_node(node)

    def _core(self, core: Core) -> None:
        values: list[Values] = [run.env for run in self.runs]
        self.last[core.carry], read = Chunk(core, self.carries[core.carry], values).run()
        for node, results in zip(core.readouts, read, strict=True):
            for run, result in zip(self.runs, results, strict=True):
                run.env[node] = result
