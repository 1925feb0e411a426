"""From Dynamo's graph to recurrences, and the graph around them."""

from __future__ import annotations

from collections.abc import Sequence as Many

from torch import fx

from reroll.capture.carry_layouts import keep_layouts
from reroll.capture.given.regions import take_given
from reroll.capture.normal.normal import normalise
from reroll.capture.normal.sizes import pin
from reroll.capture.steps.colours import Likeness, Sequence
from reroll.capture.steps.extract import extract
from reroll.capture.steps.operands import MIN_STEPS, Region, why_not
from reroll.capture.steps.outer import Outer
from reroll.capture.steps.search import find_steps, repeats
from reroll.capture.steps.step import Step
from reroll.errors import CaptureError
from reroll.graph.effects import example, has_effect, in_transform, is_random
from reroll.graph.lines import where
from reroll.graph.private import is_higher_order
from reroll.recurrence import Capture, Recurrence

_SMALL_COVERAGE = 0.6
_CLEARLY_MORE = 1.5
_FEW_STEPS = 8
_TINY = 8
_LEAST_SHARE = 0.1  # of the bytes that all operations make: blocks that make less are left to inductor


def capture(module: fx.GraphModule, *, maps: bool = False, depth: bool = False) -> Capture:
    """Find and take out the recurrences of a captured graph. The graph itself stays as it is.

    maps: also take out steps that carry nothing, so that no operation is left once for every step. depth: blocks with
    weights of their own count as steps too, where nothing repeats over time and they hold enough to pay.
    """
    transform = next((node for node in module.graph.nodes if in_transform(node)), None)
    if transform is not None:
        return Capture(module.graph, (), f"it contains a torch.func transform, at {where(transform)}")
    try:
        plain, given = take_given(module)
        normal = normalise(module, plain)
    except CaptureError as error:
        return Capture(module.graph, (), f"the graph cannot be brought to a normal form: {error}")
    sequence, steps = _steps(module, normal, maps)
    steps = _with_blocks(module, normal, steps) if depth else steps
    if not steps and not given:
        return Capture(normal, (), _explain(sequence))
    pin(module.graph)
    outer = Outer()
    recurrences = list(given)
    starts = {step.node(0, 0): step for step in steps}
    inside = {node for step in steps for node in step.sequence.nodes[step.region.start : step.region.stop]}
    for node in normal.nodes:
        if node in starts:
            recurrences.append(extract(outer, starts[node], f"recurrence_{len(recurrences)}"))
        if node.op == "output":
            outer.graph.output(fx.map_arg(node.args[0], outer.value))
        elif node not in inside:
            outer.copy(node)
    outer.graph.eliminate_dead_code(has_effect)
    outer.graph.lint()
    return _settled(module, outer.graph, recurrences)


def _settled(module: fx.GraphModule, outer: fx.Graph, recurrences: Many[Recurrence]) -> Capture:
    """The recurrences with layouts that stay as they are from step to step; none where one is refused."""
    try:
        for each in recurrences:
            _refuse_random_branches(each)
        graph, settled = keep_layouts(outer, recurrences)
    except CaptureError as error:
        return Capture(module.graph, (), str(error))
    return Capture(graph, tuple(settled))


def _refuse_random_branches(recurrence: Recurrence) -> None:
    """Raise CaptureError for ``torch.cond`` with random numbers: torch's own backward of it draws other ones again."""
    for node in recurrence.step.graph.nodes:
        if is_higher_order(node.target) and node.target.name() == "cond" and is_random(node):
            raise CaptureError(
                f"a branch of torch.cond draws random numbers, at {where(node)}, and its backward would draw others; "
                "draw them before the branch, or choose by torch.where"
            )


def _steps(module: fx.GraphModule, normal: fx.Graph, maps: bool) -> tuple[Sequence, list[Step]]:
    """Steps in program order; numbers that change are looked for only where the plain search finds little."""
    sequence = Sequence(module, normal, maps=maps)
    steps = find_steps(sequence)
    covered, size = _covered(steps), len(sequence.nodes)
    if size - covered < MIN_STEPS * 2:
        return sequence, steps
    abstract = Sequence(module, normal, Likeness.NUMBERS, maps=maps)
    if covered < _SMALL_COVERAGE * size:
        others = find_steps(abstract)
        if _covered(others) > _CLEARLY_MORE * covered:
            return abstract, _worthwhile(others)
    return sequence, _worthwhile(_with_more(steps, abstract))


def _with_blocks(module: fx.GraphModule, normal: fx.Graph, steps: list[Step]) -> list[Step]:
    """Steps in program order, and between them blocks that differ in their weights alone, if these hold enough."""
    for likeness in (Likeness.WEIGHTS, Likeness.FROZEN):
        sequence = Sequence(module, normal, likeness)
        made = [0 if value is None else value.nbytes for value in map(example, sequence.nodes)]
        least = _LEAST_SHARE * sum(made)
        more = _with_more(steps, sequence)
        steps = [s for s in more if s in steps or sum(made[s.region.start : s.region.stop]) >= least]
    return _worthwhile(steps)


def _with_more(steps: list[Step], sequence: Sequence) -> list[Step]:
    """The steps, and those that a sequence of the same nodes has between them, in program order."""
    borders = [0, *(at for step in steps for at in (step.region.start, step.region.stop)), len(sequence.nodes)]
    between = zip(borders[::2], borders[1::2], strict=True)
    more = [step for low, high in between for step in find_steps(sequence, low, high)]
    return sorted([*steps, *more], key=lambda step: step.region.start)


def _worthwhile(steps: list[Step]) -> list[Step]:
    """Without repetitions that are both short and tiny beside the largest: they cost more to compile than they save."""
    largest = max((step.region.size for step in steps), default=0)
    return [s for s in steps if s.region.steps >= _FEW_STEPS or s.region.size * _TINY >= largest]


def _covered(steps: list[Step]) -> int:
    return sum(step.region.size for step in steps)


def _explain(sequence: Sequence) -> str:
    """What was looked for, and where the repetition broke."""
    size = len(sequence.nodes)
    looked = f"looked for a step that repeats at least {MIN_STEPS} times and carries a value, in {size} operations"
    runs = repeats(sequence.colour)
    if not runs:
        return (
            f"{looked}; no sequence of operations repeats three times. If the model has a loop over time, Dynamo may "
            "have broken the graph in it, which fullgraph=True shows"
        )
    covered, period, start, stop = runs[0]
    first = where(sequence.nodes[start])
    broke = f"up to {where(sequence.nodes[stop])}" if stop < size else "up to the end of the graph"
    return (
        f"{looked}; the longest repetition is {period} operations, {covered // period} times, from {first}, {broke}; "
        f"but {why_not(sequence, Region(start, period, covered // period))}"
    )
