"""The compiled segments of a recurrence: traced, cut, rewritten by passes, lowered, each length once.

Whether what ``keep`` and ``recompute`` name is there is looked for in all loops of a graph before any is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from reroll.backends.cache.traces import recall, remember, trace_key, way_of_reading
from reroll.backends.inductor.event_counts import Watch
from reroll.backends.inductor.lower import Segment, cut_both_ways, has_vectors, lower, prepare
from reroll.backends.inductor.sizes.family import code_settings
from reroll.backends.inductor.whole import refused_by_inductor
from reroll.backends.processes.collectives import groups_of
from reroll.backends.progress import progress
from reroll.backends.runtime.executable import Compiled, Executable
from reroll.backends.runtime.recordings import Graphs
from reroll.backends.runtime.run import as_traced
from reroll.backends.tiers.device import background_of, home_of
from reroll.capture.recorder.identity import PLAIN, Same
from reroll.capture.steps.numbers import Place
from reroll.graph.editing import content_of, flatten, rebuild
from reroll.graph.effects import attribute
from reroll.graph.names import names_of, show_names
from reroll.graph.work import work
from reroll.passes import DEFAULT_PASSES
from reroll.planning.options import Options
from reroll.planning.replaying import Replaying
from reroll.program.context import Context
from reroll.program.registry import find as find_pass
from reroll.program.registry import pass_names, run_on_half, run_on_step
from reroll.recurrence import Recurrence
from reroll.schedules.interval import Interval
from reroll.schedules.named import tree
from reroll.schedules.problem import Problem
from reroll.segment.cut.partition import Cut
from reroll.segment.cut.policy import Policy, check_texts, forward_values
from reroll.segment.invariants import Once
from reroll.segment.linear.steps import LINEAR
from reroll.segment.trace import Traced, constant_names, input_layouts, trace

PACKING = "pack-weights"
_SMALL = 256  # elements of a tensor that is known by its values


def check_policy(recurrences: Sequence[Recurrence], options: Options) -> None:
    """Raise OptionError for a text in ``keep`` or ``recompute`` that is in none of the loops. Traces a step of each."""
    policy = options.policy(" and ".join(each.where for each in recurrences))
    if not any(isinstance(rule, str) for rule in (*policy.keep, *policy.recompute)):
        return
    values = []
    for each in recurrences:
        traced = prepared(replace(each, step=show_names(each.step)), 1, options.lowering)
        values += forward_values(traced.graph.graph, traced.outputs)
    check_texts(policy, values)


class Results(NamedTuple):
    """Examples of what a recurrence gives: the last carry, and its outputs, stacked, with the rows that are kept; they
    require a gradient where one goes through them."""

    last: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]


def results_of(segment: Segment, recurrence: Recurrence) -> Results:
    """What a recurrence gives."""
    carries = len(recurrence.carries)
    outputs = zip(segment.output_examples[carries:], recurrence.kept_rows, strict=True)
    rows = [like.new_empty((kept.rows(recurrence.steps), *like.shape[1:])) for like, kept in outputs]
    examples = enumerate((*segment.output_examples[:carries], *rows))
    made = tuple(like.detach().requires_grad_(index in segment.tangents) for index, like in examples)
    return Results(made[:carries], made[carries:])


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Kernels:
    """The compiled segments of a recurrence, and what their passes were told, with what was proved of its carry.

    ``captured``: the step before passes, ``step`` behind them. ``traced``: the longest segment. ``replay``: backwards
    repeat products from what is kept of spikes; ``replaying``: what that changes, where tapes are small then.
    """

    traced: Traced
    compiled: Compiled
    context: Context
    captured: fx.GraphModule
    step: fx.GraphModule
    replay: bool
    replaying: Replaying | None = None

    @property
    def random(self) -> bool:
        """Whether a step draws random numbers."""
        return self.traced.random

    @property
    def numbers_on(self) -> torch.device:
        """Where numbers lie that differ from step to step."""
        assert self.context.recurrence is not None
        return self.context.recurrence.numbers_on


def compile_kernels(
    recurrence: Recurrence,
    options: Options,
    lengths: Sequence[int],
    loops: int = 1,
    known: Mapping[int, Traced] | None = None,
) -> Kernels:
    """Segments of the given lengths, longest first, of one of so many ``loops`` that share a budget. They serve any
    number of steps; whether they replay products is decided by that of the recurrence (``select_kernels``). ``known``:
    traces of such segments."""
    context = _context(recurrence, options, lengths[0])
    recordable = options.cuda_graphs and not groups_of(recurrence.step)  # collectives are launched one by one
    device = background_of(recurrence.examples) if recordable else None
    if device is not None and options.lowering == "inductor":  # eager would round them to the type of the step
        recurrence = replace(recurrence, numbers_on=device)
    policy, captured = options.policy(recurrence.where), _copied(recurrence.step)
    recurrence = replace(recurrence, step=run_on_step(passes_of(options), recurrence.step, context))
    shown = replace(recurrence, step=show_names(recurrence.step)) if policy else recurrence
    traced = {k: known[k] if known and k in known else prepared(shown, k, options.lowering) for k in lengths}
    facts = traced[lengths[0]].facts if options.codec != "none" else ()
    replaying, watch = _replaying(traced[lengths[0]], recurrence, options, policy), Watch()
    replay = _replays(replaying, recurrence.steps, options, loops)
    several = not replay and options.schedule != "store_all"  # of the tapes are made again, or are thin
    once = Once(constant_names(recurrence))
    context = replace(context, recurrence=recurrence, facts=facts)
    lowered = partial(
        lower,
        lowering=options.lowering,
        codec=options.codec,
        policy=policy,
        replay=replay,
        again=several and device is None,
        thin=several and bool(recurrence.blocks) and options.may_be_thin,
        recorded=device is not None,
        rewrite=partial(run_on_half, passes_of(options), context=context),
        watch=watch,
        once=once,
    )
    told = progress(f"compiling segments of {' and '.join(map(str, lengths))} steps of the loop at {recurrence.where}")
    with told, refused_by_inductor(f"a segment of the loop at {recurrence.where}"), as_traced(recurrence.examples):
        segments = {k: lowered(each) for k, each in traced.items()}
    compiled = Compiled(segments, watch, once, Graphs(device, recurrence.where, traced[lengths[0]].random))
    return Kernels(traced[lengths[0]], compiled, context, captured, recurrence.step, replay, replaying)


def _context(recurrence: Recurrence, options: Options, segment: int) -> Context:
    """What passes are told before anything is traced."""
    vectors = has_vectors(options.lowering, home_of(recurrence.examples))
    root = store_all_root(recurrence, segment)
    return Context(root, recurrence, codec=options.codec, lowering=options.lowering, vectors=vectors)


def build_kernels(executables: Sequence[Executable]) -> None:
    """Build the kernels of the segments of some recurrences."""
    for each in executables:
        where, segments = each.recurrence.where, each.compiled.segments.values()
        units = [unit for segment in segments for unit in segment.unbuilt]
        if not units:
            continue
        told = progress(f"building the kernels of the loop at {where}")
        with told, refused_by_inductor(f"a segment of the loop at {where}"):
            for unit in units:
                unit.settle()


def _copied(step: fx.GraphModule) -> fx.GraphModule:
    """The same step, which stays as it is where a pass changes the other in place."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(step.graph, {}))
    return fx.GraphModule(step, graph)


def _replays(replaying: Replaying | None, steps: int, options: Options, loops: int) -> bool:
    """Whether backwards repeat products: as asked for, else where it pays."""
    if options.replay != "auto" or replaying is None:
        return options.replay is True
    return replaying.pays(steps, options, loops)


def select_kernels(compiled: Callable[[Options], Kernels], steps: int, options: Options, loops: int) -> Kernels:
    """Segments ``compiled`` by some options, or by others where they were made for another number of steps, for which
    it paid to replay products, or not to, as it does not for these ``steps``."""
    kernels = compiled(options)
    if _replays(kernels.replaying, steps, options, loops) == kernels.replay:
        return kernels
    return compiled(replace(options, replay=not kernels.replay))


def prepared(recurrence: Recurrence, steps: int, lowering: str) -> Traced:
    """A traced segment that is ready to be cut; for inductor the one that another process kept, if there is one."""
    key = trace_key(recurrence, steps) if lowering == "inductor" else None
    found = None if key is None else recall(key)
    if found is None:
        found = trace(recurrence, steps, decompose=lowering == "inductor")
        prepare(found, lowering)
        if key is not None:
            remember(key, found)
    return found


def _replaying(traced: Traced, recurrence: Recurrence, options: Options, policy: Policy) -> Replaying | None:
    """What replaying products changes, if a tape of all steps is small then; nothing if a schedule was asked for that
    runs steps again."""
    if options.schedule not in ("auto", "store_all"):
        return None
    cuts = cut_both_ways(traced, options.lowering, options.codec, policy)
    if cuts is None:
        return None
    kept, replayed = cuts
    return Replaying(
        traced.steps,
        carry=sum(value.nbytes for value in traced.results[: traced.carries]),
        kept=int(kept.kept),
        replayed=int(replayed.kept),
        beside=_weight_bytes(recurrence, options),
        work=_work(replayed) / _work(kept),
    )


def _work(cut: Cut) -> float:
    return work(cut.forward.graph) + work(cut.backward.graph)


def _weight_bytes(recurrence: Recurrence, options: Options) -> int:
    """Bytes of the gradients of weights, and of these weights packed for a forward and for a backward."""
    weights = [recurrence.examples[number] for number in recurrence.constants]
    copies = 1 + 2 * (options.lowering == "inductor" and packs(options))
    return sum(copies * each.nbytes for each in weights if each.requires_grad and each.ndim > 1)


def packs(options: Options) -> bool:
    """Whether the passes pack weights."""
    return PACKING in passes_of(options)


def passes_of(options: Options) -> tuple[str, ...]:
    """The names of the passes to run, in order."""
    return DEFAULT_PASSES if options.passes is None else pass_names(options.passes)


def store_all_root(recurrence: Recurrence, segment: int) -> Interval:
    """The tree of plain BPTT, which stands until a schedule is chosen."""
    return tree("store_all", Problem(recurrence.steps, segment))


def kind(recurrence: Recurrence, steps: int) -> Any:
    """What segments of so many steps, and shorter ones, depend on beside options: all that a segment sees, and how it
    takes that. How many steps the recurrence has, and where its operands lie, is no part of it."""
    return (
        content(recurrence.step),
        steps,
        input_layouts(recurrence, steps),
        tuple(map(way_of_reading, recurrence.xs)),
        (len(recurrence.carries), len(recurrence.constants), len(recurrence.ys)),
        (recurrence.autocast, recurrence.grad_enabled, recurrence.numbers_on),
        (recurrence.any_length, recurrence.blocks, recurrence.random),
        bool(recurrence.step.meta.get(LINEAR)),
    )


def made_by(options: Options) -> Any:
    """What segments depend on of some options."""
    passes, asked = passes_of(options), options.policy("")
    rules = (
        tuple(each if isinstance(each, str) else Same(each) for each in some) for some in (asked.keep, asked.recompute)
    )
    return (
        (options.lowering, options.start, options.codec, options.schedule, options.replay),
        (options.cuda_graphs, options.may_be_thin, *rules),
        tuple((name, Same(find_pass(name).target)) for name in passes),
        code_settings() if options.lowering == "inductor" else None,
    )


def content(module: fx.GraphModule, apart: Sequence[Place] = ()) -> tuple[Any, ...]:
    """What a graph does, equal where another one does the same: numbers and texts by value, functions and other objects
    by identity, and kept alive. ``apart``: numbers that are told by their type alone."""
    places, found, numbers = dict[fx.Node, int](), list[Any](), {each.node: each for each in apart}
    for place, node in enumerate(module.graph.nodes):
        places[node] = place
        what: Any = None
        if node.op in ("get_attr", "call_module"):
            what = attribute_content(attribute(module, node))
        elif node.op != "placeholder":
            what = _said(node.target, places)
        given = ((), {}) if node.op == "placeholder" else (node.args, node.kwargs)
        if node in numbers:
            leaves = flatten(node)
            leaves[numbers[node].place] = type(numbers[node].value)
            given = rebuild(node, leaves)
        found.append((node.op, what, _said(given, places), names_of(node)))
    return tuple(found)


def attribute_content(value: Any) -> Any:
    """What a graph holds."""
    if isinstance(value, fx.GraphModule):
        return content(value)
    small = type(value) is Tensor and value.numel() <= _SMALL and not value.requires_grad
    return content_of(value) if small else Same(value)


def _said(value: Any, places: Mapping[fx.Node, int]) -> Any:
    """An operand, equal where it is the same: 1, 1.0 and True are not."""
    if isinstance(value, fx.Node):
        return fx.Node, places[value]
    if isinstance(value, tuple | list):
        return "tuple" if isinstance(value, tuple) else "list", tuple(_said(each, places) for each in value)
    if isinstance(value, dict):
        return "dict", tuple((_said(key, places), _said(each, places)) for key, each in value.items())
    if isinstance(value, slice):
        return slice, tuple(_said(each, places) for each in (value.start, value.stop, value.step))
    plain = type(value) in (*PLAIN, type(...), torch.layout, torch.memory_format)
    return (type(value), repr(value)) if plain else Same(value)
