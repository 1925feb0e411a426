"""``reroll.explain``: what a compiled model will do, without doing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import fx

from reroll.backends.codecs.codec import CODECS
from reroll.backends.construct.artifacts import artifact
from reroll.backends.construct.bytes import operand_gradients
from reroll.backends.construct.plan import Built
from reroll.backends.construct.stages.takeover import aside
from reroll.backends.construct.timing import clocked
from reroll.backends.dynamo.entry import EXPLAINING, Asked, Graph, Reached
from reroll.backends.front.python_state.state import State
from reroll.backends.inductor.lower import Segment
from reroll.backends.measure.rewrites import rewrites_of
from reroll.backends.runtime.randomness import random_numbers_kept
from reroll.backends.tiers.calibrate import calibrate
from reroll.backends.tiers.device import background_of
from reroll.errors import OptionError, UnsupportedError
from reroll.graph.private import compiled_in_place
from reroll.planning.alternative import alternatives, may_move_carries
from reroll.program.memory import OuterMemory, predict
from reroll.report.report import CarryLine, Loop, Report
from reroll.schedules.machine import Costs, Machine
from reroll.segment.facts import kept_as
from reroll.segment.sparsity import Fact
from reroll.words.units import nbytes_text

_COMPILE = 'Compile it by reroll.compile(model), or torch.compile(model, backend="reroll"). '
_MUCH = 0.5  # of the peak


@aside()
def explain(compiled_model: Any, *inputs: Any, **kwargs: Any) -> Report:
    """The plan of ``torch.compile(model, backend="reroll", ...)`` or ``reroll.compile(model, ...)`` for these inputs.

    The model is compiled if it was not yet, and that stays; the graph itself does not run, only segments on numbers
    that are made up for it, to measure their seconds. So nothing is trained, and neither parameters, gradients,
    buffers, attributes of modules nor random numbers change. If Dynamo has cut the model into several graphs, or reads
    a function of it by itself, the plan is that of the first with a loop, and ``others`` has those of the rest; the
    forward runs for that, and what it changes is put back. Raises UnsupportedError if no graph of the backend "reroll"
    is reached; a model that was compiled by another one has run then. Raises OptionError without inputs.
    """
    report = _explained(reached(compiled_model, inputs, kwargs), compiled_model, inputs, kwargs)
    artifact("reroll_report", report.text)
    return report


def _explained(graph: Graph, compiled_model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Report:
    if graph.built and not graph.broken:
        report = plan(graph)
        return replace(report, notes=(*report.notes, *_output_share(report, compiled_model)))
    asked = Asked(through=True)
    _run_through(compiled_model, inputs, kwargs, asked)
    others = tuple(plan(each) for each in dict.fromkeys(asked.graphs) if each is not graph)
    return replace(plan(graph), others=others)


def _output_share(report: Report, compiled_model: Any) -> Iterator[str]:
    """A sentence, if much of the peak is what the model gives for all steps, and the gradient of that."""
    over_time = hasattr(compiled_model, "reroll_caller") and not any(loop.recurrence.blocks for loop in report.loops)
    peak = report.predicted_peak
    if over_time and peak and 2 * report.outputs > _MUCH * peak:
        yield (
            f"What the model gives is {nbytes_text(report.outputs)}, which is held through the backward, and its "
            f"gradient as well, beside a peak of {nbytes_text(peak)}. If a loss makes one number of it, compile both "
            "together: reroll.compile(model, loss=...)."
        )


def reached(compiled_model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph:
    """The graph that a call would run, which it does not. Raises as ``explain`` does."""
    if not _is_compiled(compiled_model):
        raise UnsupportedError(
            f"explain was given {_name(compiled_model)}, which was not compiled. Give it what "
            'reroll.compile(model, ...) or torch.compile(model, backend="reroll") returned.'
        )
    if hasattr(compiled_model, "reroll_caller") and not inputs and not kwargs:
        raise OptionError(
            f"explain was given no inputs of {_name(compiled_model.reroll_caller.model)}. Give it those of a call too."
        )
    graph = _reached(compiled_model, inputs, kwargs, Asked())
    if graph is not None and not graph.built:  # it may be that of a function which the model calls
        graph = _run_through(compiled_model, inputs, kwargs, Asked(onward=True))
    if graph is not None:
        return graph
    why = (
        "The model was compiled before, in place, by its own method compile(), so Dynamo does not read it for another "
        "backend: leave that call out, or name the backend there."
        if compiled_in_place(model_of(compiled_model))
        else f"{'' if hasattr(compiled_model, 'reroll_caller') else _COMPILE}Check that Dynamo is not disabled. A "
        "graph break in the loop (print, .item(), a branch on values) makes Dynamo run it uncompiled: "
        "TORCH_LOGS=graph_breaks shows where."
    )
    raise UnsupportedError(f"explain ran {_name(compiled_model)}, and no graph compiled by reroll was reached. {why}")


def _run_through(model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any], asked: Asked) -> Graph | None:
    """The first graph with a loop that a call reaches, which runs those before it; what they change is put back."""
    state = State.of(model_of(model), inputs, kwargs, parameters=True)
    try:
        return _reached(model, inputs, kwargs, asked)
    finally:
        state.restore()


def _reached(model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any], asked: Asked) -> Graph | None:
    token = EXPLAINING.set(asked)
    try:
        with random_numbers_kept():
            model(*inputs, **kwargs)
    except Reached:
        pass
    finally:
        EXPLAINING.reset(token)
    return next((graph for graph in asked.graphs if graph.built), asked.graphs[0] if asked.graphs else None)


def model_of(compiled_model: Any) -> Any:
    """What was compiled; a model that was not is itself."""
    if hasattr(compiled_model, "reroll_caller"):
        return compiled_model.reroll_caller.model
    return getattr(compiled_model, "_orig_mod", getattr(compiled_model, "_torchdynamo_orig_callable", compiled_model))


def _is_compiled(model: Any) -> bool:
    marks = ("_torchdynamo_orig_callable", "reroll_caller", "reroll_run")
    return any(hasattr(model, mark) for mark in marks) or getattr(model, "_compiled_call_impl", None) is not None


def _name(model: Any) -> str:
    return str(getattr(model, "__name__", type(getattr(model, "_orig_mod", model)).__name__))


def plan(graph: Graph) -> Report:
    """The report on a compiled graph."""
    outer = graph.module.graph
    broken = f"Dynamo ended this graph before the end of the model ({graph.broken}); other graphs follow it."
    notes = (*graph.notes, *((broken,) if graph.broken else ()))
    if not graph.built:
        return Report((), outer, reason=graph.reason, notes=notes)
    outside = graph.outside()
    costs = {built.name: _costs_or_why_not(built) for built in graph.built}
    notes += tuple(each for each in costs.values() if isinstance(each, str))
    notes += tuple(filter(None, (*map(_unrecorded, graph.built), graph.more_than_plain(unasked=False))))
    notes = tuple(dict.fromkeys(notes))  # loops may share a reason
    loops = tuple(_loop(built, outside.around(built.name), costs[built.name]) for built in graph.built)
    return Report(
        loops, outer, outside.outputs, outside.saved, notes=notes, proved=graph.proof.summary, stages=graph.stages()
    )


def costs_of(built: Built) -> Costs:
    """Seconds of the segments of a recurrence, and of transfers if its program makes any."""
    moving = may_move_carries(built.choice, built.options)
    machine = calibrate(folder=built.options.spill_folder) if moving else Machine("this machine")
    return Costs(clocked(built.executable), machine)


def _costs_or_why_not(built: Built) -> Costs | str:
    try:
        return costs_of(built)
    except UnsupportedError as error:
        return f"No times are predicted. {error}"


def _unrecorded(built: Built) -> str:
    """Why the segments of a recurrence are not recorded, if they could be; else nothing."""
    possible, used = built.kernels.compiled.graphs, built.executable.compiled.graphs
    if possible.device is None or used.device is not None:
        return ""
    why = "what recordings hold leaves too little of the budget" if possible.worthwhile else "the device is behind them"
    where = built.executable.recurrence.where
    return f"Kernels of the loop at {where} are launched one by one, and not recorded as CUDA graphs: {why}."


def _loop(built: Built, around: OuterMemory, costs: Costs | str) -> Loop:
    choice, needs = built.choice, built.demand.needs.within(around)
    demand = replace(built.demand, needs=needs)
    plan = replace(built.plan, prediction=predict(built.plan.tally, needs))
    executable, segment = built.executable, built.executable.compiled.segments[choice.segment]
    recurrence, width = executable.recurrence, len(executable.recurrence.carries)
    facts = plan.program.facts or tuple(Fact() for _ in recurrence.carries)
    coded = bool(plan.program.facts)
    lines = []
    for name, value, fact in zip(recurrence.carries, segment.output_examples[:width], facts, strict=True):
        codec = kept_as(fact, built.options.codec) if coded else "raw"
        dtype = str(value.dtype).removeprefix("torch.")
        kept = CODECS.find(codec).nbytes(value.numel(), value.dtype)
        lines.append(CarryLine(name, tuple(value.shape), dtype, value.nbytes, codec, kept, fact.describe()))
    ledger = built.executable.ledger
    return Loop(
        recurrence=recurrence,
        plan=plan,
        carries=tuple(lines),
        saved=needs.segments[choice.segment].saved,
        outputs=sum(value.nbytes for value in built.results().rows),
        around=around,
        gradients=operand_gradients(segment, recurrence),
        needs=needs,
        costs=None if isinstance(costs, str) else costs,
        budget=choice.allowed,
        alternatives=() if isinstance(costs, str) else alternatives(plan, demand, built.options, costs),
        measured_seconds=None if background_of(recurrence.examples) else executable.clock.seconds,
        lowering=built.options.lowering,
        kept=(ledger.carries, ledger.plain_nbytes, ledger.kept_nbytes),
        events=executable.compiled.watch.lines,
        taped=segment.tape,
        gradient_error=ledger.gradient_error,
        cuts=executable.cuts,
        rewriting=cache(partial(rewrites_of, built)),
        prefetched="prefetch" in built.demand.passes and choice.ahead,
        options=built.options,
        captured=replace(recurrence, step=built.kernels.captured),
        halves=_halves(segment),
    )


def _halves(segment: Segment) -> dict[str, fx.GraphModule]:
    """The graphs of a segment; a loop that needs no gradient has no backward."""
    found = {"forward": segment.forward_graph, "backward": segment.backward_graph}
    return {name: half for name, half in found.items() if half is not None}
