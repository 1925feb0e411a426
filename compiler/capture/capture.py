"""From Dynamo's graph to recurrences, and the graph around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from functools import partial

from torch import fx

from reroll.capture.carry_layouts import keep_layouts
from reroll.capture.ends import even_ends
from reroll.capture.folded import Gapped, is_mark, is_row, unfolded
from reroll.capture.normal.normal import normalise
from reroll.capture.normal.selects import read_before
from reroll.capture.normal.sizes import pin
from reroll.capture.steps.blocks import Blocks, with_blocks
from reroll.capture.steps.extract import extract
from reroll.capture.steps.iterations import by_iterations, with_iterations
from reroll.capture.steps.node_hash import Likeness, Sequence
from reroll.capture.steps.operands import MIN_STEPS, Region, why_not
from reroll.capture.steps.outer import Outer
from reroll.capture.steps.search import covered, find_steps, repeats, with_more, worthwhile
from reroll.capture.steps.step import Step
from reroll.capture.structured_loops.regions import capture_structured_loops
from reroll.errors import CaptureError
from reroll.graph.editing import drop_dead
from reroll.graph.effects import in_transform, is_random
from reroll.graph.lines import where
from reroll.graph.private import is_higher_order
from reroll.recurrence import Capture, Recurrence

_SMALL_COVERAGE = 0.6
_CLEARLY_MORE = 1.5


def capture(module: fx.GraphModule, *, maps: bool = False, depth: bool = False, iterations: bool = False) -> Capture:
    """Find and take out the recurrences of a captured graph. The graph itself stays as it is.

    maps: also take out steps that carry nothing, so that no operation is left once for every step. depth: blocks with
    weights of their own count as steps too, where nothing repeats over time and they hold enough to pay. iterations:
    steps begin where the iterations of the user's loop do, where that is known.

    Runs that are missing in a folded graph (``capture.folded``) are never written out, where each of them is one of a
    step that is found; else all of them are, in the graph itself.
    """
    search = partial(_capture, maps=maps, depth=depth, iterations=iterations)
    try:
        return search(module)
    except Gapped:
        return search(unfolded(module))


def _capture(module: fx.GraphModule, *, maps: bool, depth: bool, iterations: bool) -> Capture:
    transform = next((node for node in module.graph.nodes if in_transform(node)), None)
    if transform is not None:
        reason = f"it contains a torch.func transform, at {where(transform)}"
        return Capture(module.graph, (), reason)
    try:
        plain, given = capture_structured_loops(module)
        normal = normalise(module, plain)
    except CaptureError as error:
        reason = f"the graph cannot be brought to a normal form: {error}"
        return Capture(module.graph, (), reason)
    sequence, steps = _steps(module, normal, maps)
    blocks = with_blocks(module, sequence, steps) if depth else Blocks(sequence, steps)
    steps = [by_iterations(each, blocks.steps) for each in blocks.steps] if iterations else blocks.steps
    _refuse_gaps(blocks.sequence, steps)
    if not steps and not given:
        return Capture(normal, (), blocks.small or _explain(blocks.sequence))
    pin(module.graph)
    outer = Outer()
    recurrences = list(given)
    starts = {step.node(0, 0): step for step in steps}
    inside = {node for step in steps for node in step.sequence.nodes[step.region.start : step.region.stop]}
    for node in normal.nodes:
        if node in starts:
            made = extract(outer, starts[node], f"recurrence_{len(recurrences)}")
            recurrences.append(with_iterations(made, starts[node], steps, cut=iterations))
        if node.op == "output":
            outer.graph.output(fx.map_arg(node.args[0], outer.value))
        elif is_row(node):
            outer.take(node)
        elif node not in inside and not is_mark(node):
            outer.copy(node)
    drop_dead(outer.graph)
    outer.graph.lint()
    return _settled(module, outer.graph, recurrences)


def _refuse_gaps(sequence: Sequence, steps: Many[Step]) -> None:
    """Raise Gapped where runs are missing that are in no step."""
    for gap in sequence.gaps:
        if not any(step.region.start < gap.at < step.region.stop for step in steps):
            raise Gapped


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
    """Steps in program order, whose first and last turns are like the others where nothing that matters differs."""
    sequence, steps = _found(module, normal, maps)
    inside = {node for step in steps for node in sequence.nodes[step.region.start : step.region.stop]}
    if read_before(normal, (node for node in sequence.nodes if node not in inside)):
        sequence, steps = _found(module, normal, maps)
    return _found(module, normal, maps) if even_ends(sequence, steps) else (sequence, steps)


def _found(module: fx.GraphModule, normal: fx.Graph, maps: bool) -> tuple[Sequence, list[Step]]:
    """Steps in program order; numbers that change are looked for only where the plain search finds little."""
    sequence = Sequence(module, normal, maps=maps)
    steps = find_steps(sequence)
    found, size = covered(steps), sequence.size
    if size - found < MIN_STEPS * 2:
        return sequence, steps
    abstract = Sequence(module, normal, Likeness.NUMBERS, maps=maps)
    if found < _SMALL_COVERAGE * size:
        others = find_steps(abstract)
        if covered(others) > _CLEARLY_MORE * found:
            return abstract, worthwhile(others)
    return sequence, worthwhile(with_more(steps, abstract))


def _explain(sequence: Sequence) -> str:
    """What was looked for, and where the repetition broke."""
    size = len(sequence.nodes)
    looked = f"looked for a step that repeats at least {MIN_STEPS} times and carries a value, in {size} operations"
    runs = repeats(sequence.colour)
    if not runs:
        lines = Counter(line for line in map(where, sequence.nodes) if line.startswith("File "))
        at = "".join(f", most of them at {line}" for line, _ in lines.most_common(1))
        return (
            f"{looked}{at}; no sequence of operations repeats three times{_over_depth(sequence)}. Are steps alike? One "
            "that reads all states so far is like no other: let it read the last few, or a tensor of fixed size"
        )
    found, period, start, stop = runs[0]
    first = where(sequence.nodes[start])
    broke = f"up to {where(sequence.nodes[stop])}" if stop < size else "up to the end of the graph"
    return (
        f"{looked}; the longest repetition is {period} operations, {found // period} times, from {first}, {broke}; "
        f"but {why_not(sequence, Region(start, period, found // period))}"
    )


def _over_depth(sequence: Sequence) -> str:
    return ", also where blocks may have weights of their own" if sequence.likeness >= Likeness.WEIGHTS else ""
