"""From Dynamo's graph to recurrences, and the graph around them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from reroll.detect import Region, Sequence, find_regions, repeats
from reroll.extract import extract
from reroll.functional import where
from reroll.normal import normalise
from reroll.outer import Outer
from reroll.recurrence import Recurrence
from reroll.region_step import Step, analyse

_SMALL_COVERAGE = 0.6
_CLEARLY_MORE = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The recurrences of a graph, and ``outer``: the graph around them, which calls each as a module of its name.

    ``reason`` says what was looked for and where the repetition broke, if there is no recurrence.
    """

    outer: fx.Graph
    recurrences: tuple[Recurrence, ...]
    reason: str = ""


def capture(module: fx.GraphModule) -> Capture:
    """Find and take out the recurrences of a captured graph. The graph itself stays as it is."""
    normal = normalise(module.graph)
    sequence, steps = _steps(module, normal)
    if not steps:
        return Capture(normal, (), _explain(sequence))
    outer = Outer()
    recurrences: list[Recurrence] = []
    starts = {step.node(0, 0): step for step in steps}
    inside = {node for step in steps for node in _nodes(sequence, step.region)}
    for node in normal.nodes:
        if node in starts:
            recurrences.append(extract(outer, starts[node], f"recurrence_{len(recurrences)}"))
        if node.op == "output":
            outer.graph.output(fx.map_arg(node.args[0], outer.value))
        elif node not in inside:
            outer.copy(node)
    outer.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output", "call_module") or _keeps(node))
    outer.graph.lint()
    return Capture(outer.graph, tuple(recurrences))


def _keeps(node: fx.Node) -> bool:
    from reroll.normal import has_effect

    return has_effect(node)


def _nodes(sequence: Sequence, region: Region) -> list[fx.Node]:
    return sequence.nodes[region.start : region.stop]


def _steps(module: fx.GraphModule, normal: fx.Graph) -> tuple[Sequence, list[Step]]:
    """Analysed regions; numbers that move are looked for only where the plain search finds little."""
    sequence = Sequence(module, normal, abstract=False)
    steps = _analysed(sequence)
    covered = _covered(steps)
    if covered >= _SMALL_COVERAGE * len(sequence.nodes):
        return sequence, steps
    abstract = Sequence(module, normal, abstract=True)
    others = _analysed(abstract)
    return (abstract, others) if _covered(others) > _CLEARLY_MORE * covered else (sequence, steps)


def _analysed(sequence: Sequence) -> list[Step]:
    found = [analyse(sequence, region) for region in find_regions(sequence)]
    return [step for step in found if step is not None]


def _covered(steps: list[Step]) -> int:
    return sum(step.region.period * step.region.steps for step in steps)


def _explain(sequence: Sequence) -> str:
    """What was looked for, and where the repetition broke."""
    size = len(sequence.nodes)
    looked = f"looked for a step that repeats at least 3 times with a value carried between steps in {size} operations"
    runs = repeats(sequence.colour)
    if not runs:
        return f"{looked}; no sequence of operations repeats three times"
    covered, period, start, stop = runs[0]
    first = where(sequence.nodes[start])
    broke = f"it ends before {where(sequence.nodes[stop])}" if stop < size else "it reaches the end of the graph"
    return (
        f"{looked}; the longest repetition is {period} operations, {covered // period} times, from {first}, {broke}; "
        "but its operands keep no one relation from step to step, or nothing is carried"
    )
