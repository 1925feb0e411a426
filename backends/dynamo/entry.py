"""The torch.compile backend named ``reroll``.

Dynamo hands over the graph before autograd. Its recurrences are taken out, compiled and put back as modules; what is
around them runs as it was written, or compiled where that can pay. While ``reroll.explain`` asks, a compiled graph does
not run: it names itself and raises. Dynamo changes attributes of modules only after the graph has run, so nothing is
changed.

Private torch API, tried on 2.11 and 2.13: ``FakeTensorMode`` to run the graph around the recurrences without memory,
``ShortenTraceback``, whose kin Dynamo raises as they are, ``TorchRuntimeError``, ``Unsupported``, ``UserError`` and
``InternalTorchDynamoError`` (what it raises where it cannot trace; ``ConstraintViolationError`` and
``GuardOnDataDependentSymNode`` go through it as they are), ``config`` with its ``disable``, ``patch`` and
``_make_closure_patcher``, ``dynamo_ctx`` of a compiled module, or the ``self`` of a compiled function, with
``enter_exit_hooks``, which run around each of its calls, and ``_stance``: whether the user has switched it off.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import ShortenTraceback

from reroll.backends.construct.build import Conditions, Known, UnknownError, build_all, compile_usual
from reroll.backends.construct.kernels import Results, check_policy, passes_of
from reroll.backends.construct.plan import Built
from reroll.backends.construct.replan import Plans
from reroll.backends.construct.stages.proof import Proof, eager, shown_by
from reroll.backends.construct.stages.takeover import Spent, Takeover, is_aside
from reroll.backends.dynamo.garbage import SELDOM_FULL
from reroll.backends.dynamo.graph_breaks import UNRECORDED, broken, pieces
from reroll.backends.dynamo.outer_compile import compile_surroundings, run_by_torch
from reroll.backends.dynamo.outer_memory import Outside, bytes_around, outside_of
from reroll.backends.dynamo.plain import PlainPeak, matters, more_than_plain, needing_as, say_more, with_part_of_plain
from reroll.backends.dynamo.python_rng_inputs import as_handed_over
from reroll.backends.dynamo.result_memory import lay_results
from reroll.backends.dynamo.unguarded import Read, refuse_unguarded, unseen_hooks
from reroll.backends.inductor.sizes.family import sampling
from reroll.backends.inductor.whole import compile_whole, refused_by_inductor
from reroll.backends.processes.collectives import check_collectives, refuse_in_place, speaks
from reroll.backends.processes.wrappers import in_silence, refuse_pieces
from reroll.backends.runtime.node import RecurrenceModule
from reroll.backends.runtime.shown import shown_results, unbound_results
from reroll.backends.runtime.undefined_grads import as_collected, one_by_one
from reroll.capture.capture import capture
from reroll.capture.interpreter import LoopInterpreter
from reroll.capture.structured_loops.regions import without_regions
from reroll.errors import BudgetError, OptionError, RerollError, UnsupportedError, warn
from reroll.graph.inplace import extent, overlapping
from reroll.graph.nested import tensors_of
from reroll.graph.private import without_hooks_of_all_modules
from reroll.planning.options import Options
from reroll.planning.segments import SegmentLengths
from reroll.planning.truncation import truncate_gradients
from reroll.program.memory import OuterMemory
from reroll.program.registry import loops_by_pass, run_on_loops
from reroll.recurrence import Capture, Recurrence

Compiled = Callable[..., Any]
_LONG = 512
_AROUND = 8  # times the bytes of the values around loops is more than is ever held there
LOG = logging.getLogger(__name__)
ON_META = (
    "the model holds or is given a tensor on the meta device, which has no values. Make its memory first "
    '(model.to_empty(device="cpu"), then load its weights), or use the plain model to look at shapes.'
)


def dynamo_is_off() -> bool:
    """Whether the user has asked torch to run compiled models as they are."""
    by_name = os.environ.get("TORCHDYNAMO_DISABLE") == "1"  # torch.compile reads it itself, beside its config
    return by_name or torch._dynamo.config.disable or torch._dynamo.eval_frame._stance.stance == "force_eager"


def hooks_inside() -> Any:
    """A context in which ``torch.compile`` of a model reads its hooks with it, and not as graphs of their own."""
    return torch._dynamo.config.patch(wrap_top_frame=True)


class _Under(dict[str, Any]):
    """Options of a model that is read under the present hooks of all modules. For equal options Dynamo takes the code
    that it has made, and its guards do not see these hooks."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.hooks = unseen_hooks()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Under) and self.hooks == other.hooks and dict.__eq__(self, other)

    __hash__ = None


def read(model: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """``torch.compile(model, backend="reroll")`` as ``reroll.compile`` has it: Dynamo cuts no graphs for
    ``DistributedDataParallel``, compiles many sizes, sees hooks that are added or taken away between two calls, and
    leaves it to numpy to draw numpy's random numbers."""
    # By keyword: Lightning's torch.compile leaves on a module what it is given beside it, and this backend is no part
    # of the user's model, which may be pickled.
    run = torch.compile(model=model, backend="reroll", options=_Under(options))
    settings: dict[str, Any] = {"optimize_ddp": False, "use_numpy_random_stream": True}
    settings |= {"skip_nnmodule_hook_guards": False, "recompile_limit": 256, "accumulated_recompile_limit": 4096}
    context: Any = getattr(run, "dynamo_ctx", None)
    if context is None and isinstance(run, FunctionType):  # of a function or method; what is switched off has none
        context = inspect.getclosurevars(run).nonlocals.get("self")
    if hasattr(context, "enter_exit_hooks"):
        context.enter_exit_hooks += [torch._dynamo.config._make_closure_patcher(**settings), _unrecorded]
    return run


def _unrecorded() -> Callable[[], None]:
    return functools.partial(UNRECORDED.reset, UNRECORDED.set(True))


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """One graph of Dynamo's, compiled: ``run`` is called in its place, ``module`` is the graph around the recurrences.

    ``reason`` says why there is no recurrence, ``broken`` why the model's graph ends here, if Dynamo broke it,
    ``notes`` which recurrences were not fused. ``plain``: the local peak of plain PyTorch in a training step, where
    that is known. ``proof``: whether it has to be proved. ``stages``: its loops behind each pass on loops, by name.
    """

    run: Compiled
    module: fx.GraphModule
    plans: Plans
    reason: str = ""
    broken: str = ""
    notes: tuple[str, ...] = ()
    plain: PlainPeak = field(default_factory=PlainPeak)
    proof: Proof = field(default_factory=Proof)
    stages: Callable[[], dict[str, Capture]] = dict

    @property
    def built(self) -> tuple[Built, ...]:
        """Its recurrences with their present plans."""
        return self.plans.built

    def outside(self) -> Outside:
        """What is held around the recurrences."""
        return outside_of(self.module, {each.name: each.results() for each in self.built})

    def more_than_plain(self, *, unasked: bool = True) -> str:
        """What is said where its plans are predicted to hold more than plain PyTorch would; nothing without gradients,
        as nothing is kept then, nor of little where it is ``unasked`` for."""
        if not self.built or not torch.is_grad_enabled():
            return ""
        if unasked and self._at_most() < matters(self.built, unasked=True):
            return ""
        outside = self.outside()
        return more_than_plain(
            self.plans.placed({each.name: outside.around(each.name) for each in self.built}),
            self.plain,
            unasked=unasked,
        )

    def _at_most(self) -> int:
        """Bytes that its plans hold at most, with what is around them, which is not run for this: all that the graph
        is given and makes, with gradients and what autograd saves."""
        values = (node.meta.get("example_value") for node in self.module.graph.nodes)
        around = sum(each.nbytes for value in values for each in tensors_of(value))
        return sum(each.needed for each in self.built) + _AROUND * around


class Reached(BaseException):
    """Raised in place of running a graph while it is explained; no ``except Exception`` of a model catches it."""


@dataclass(slots=True, eq=False)
class Asked:
    """Somebody who explains a model: the graphs that it reached. ``onward``: run those before the first with a loop.
    ``through``: run all of them."""

    onward: bool = False
    through: bool = False
    graphs: list[Graph] = field(default_factory=list)

    def reach(self, graph: Graph) -> None:
        """Note a graph. Raises Reached where it is not to run."""
        self.graphs.append(graph)
        if not self.through and (graph.built or not self.onward):
            raise Reached


EXPLAINING: ContextVar[Asked | None] = ContextVar("EXPLAINING", default=None)


def reroll(
    gm: fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile Dynamo's graph: ``torch.compile(model, backend="reroll", options={...})``; see ``reroll.Options``.

    mode: "reduce-overhead" asks for CUDA graphs, which segments are recorded as anyway; others are an OptionError.
    """
    try:
        read = Read.here()
        with SELDOM_FULL, without_hooks_of_all_modules():
            program, plain = _compile(gm, example_inputs, mode, options)
        return _entry(program, read, plain)
    except RerollError as error:
        raise unwrapped(error) from error.__cause__


def unwrapped(error: RerollError) -> RerollError:
    """The error as one of its own type that Dynamo hands on as it is, rather than inside a BackendCompilerFailed; its
    sentence stays as it is, too."""
    kind, text = type(error), str(error)

    def __init__(self: Exception, *args: object) -> None:
        Exception.__init__(self, *args)

    body: dict[str, Any] = {"__module__": kind.__module__, "__init__": __init__, "first_useful_frame": None}
    body["__str__"] = lambda _: text
    made: type[RerollError] = type(kind.__name__, (kind, ShortenTraceback), body)
    same = made(*error.args)
    same.__dict__.update(error.__dict__)
    return same


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Tensor], mode: str | None, options: Mapping[str, Any] | None
) -> tuple[Program, Callable[[], Compiled] | None]:
    _refuse_mode(mode)
    parsed = Options.of(options)
    _refuse(gm, example_inputs)
    example_inputs = as_handed_over(gm, example_inputs)
    found = run_on_loops(passes_of(parsed), capture(gm, depth=parsed.depth, iterations=parsed.truncate is not None), gm)
    model, ended = pieces(), _break(gm)
    model.add(bool(found.recurrences), ended)
    if parsed.truncate is not None and all(each.blocks for each in found.recurrences):
        model.missed(found.reason or "no loop over time is in it, only blocks over depth", parsed)
    if not found.recurrences:
        LOG.info("no loop: %s", found.reason)
        model.missed(found.reason, parsed)
        return Program(Graph(_by_torch(gm, example_inputs, parsed), gm, Plans(), found.reason, ended)), None
    if any(each.steps >= _LONG and not each.blocks for each in found.recurrences):
        _say_how_to_unroll_less(UNRECORDED.get())
    program = rolled(gm, found, parsed, ended)
    say_more(program.graph.more_than_plain())
    return program, functools.cache(partial(_plainly, gm))


def rolled(
    gm: fx.GraphModule,
    found: Capture,
    parsed: Options,
    ended: str = "",
    *,
    others: Others | None = None,
    conditions: Conditions | None = None,
) -> Program:
    """The program of a graph, with the recurrences that were found in it. ``ended`` says where and why it ends;
    ``others``: of the same model, at other lengths; ``conditions``: of its kernels."""
    parsed = _settled(found, gm.graph, parsed, plain := PlainPeak(gm))
    every, shared = found.recurrences, others or Others()
    bare, speaking, first = _without_graph(gm), speaks(gm), shared.begun()
    stages = partial(loops_by_pass, passes_of(parsed), found.captured or found, bare)
    needing = needing_as(gm, cut=parsed.truncate is not None)
    by_steps = needing(lambda *args: LoopInterpreter(bare, found.captured or found, checkpoints=True).run(*args))
    loops = partial(_at_any_length, every, others)

    def ahead() -> None:
        with shared.lengths.kept():
            compile_usual(loops(parsed), parsed, len(every))

    def outer_bytes(results: Mapping[str, Results]) -> Mapping[str, OuterMemory]:
        return bytes_around(assemble(bare, found.outer, {name: nn.Identity() for name in results}), results)

    def placed(way: Options, told: bool = True) -> tuple[Plans, fx.GraphModule]:
        plans = Plans(build_all(loops(way), way, outer_bytes, shared.known, conditions), told=told)
        return plans, assemble(bare, found.outer, plans.modules)

    def beside(way: Options) -> tuple[Plans, Compiled]:
        plans, module = placed(eager(way), told=False)
        return plans, needing(module)

    def made(way: Options) -> Graph:
        plans, module = placed(way)
        by_inductor = way.lowering == "inductor"
        surrounded = by_inductor and way.start == "compiled" and first  # else a call would wait for it
        run = needing(compile_surroundings(module, found.recurrences) if surrounded else module)
        apart = functools.cache(partial(beside, way)) if by_inductor else (lambda: (plans, run))
        proof = Proof.of(plans.built, way, apart, by_steps, around=[found.outer], speaks=speaking)
        return Graph(run, module, plans, "", ended, found.notes, plain=plain, proof=proof, stages=stages)

    takeover = Takeover.of(parsed, shared.spent)
    takeover.prepare = ahead
    return Program(_goes_on(takeover, made, shared) or staged(takeover, made), takeover, made)


def _at_any_length(every: Sequence[Recurrence], others: Others | None, way: Options) -> Sequence[Recurrence]:
    """Recurrences whose segments serve other lengths, too, where there are such; blocks over depth are as many."""
    if others is None:
        return every
    kinds = [(loop_kind(each), each) for each in every if not each.blocks]
    fixed = {each: others.lengths.fixed(kind, replace(each, any_length=True), way) for kind, each in kinds}
    return [fixed.get(each, each) for each in every]


def _settled(found: Capture, graph: fx.Graph, options: Options, plain: PlainPeak) -> Options:
    """The options for some loops, of which the graph around them gives what the plain ``graph`` gives, with gradients
    cut where that is asked for. Raises for what these options cannot be met with."""
    lay_results(found.outer, graph)
    truncate_gradients(found.outer, found.recurrences, options.truncate)
    check_policy(found.recurrences, options)
    check_collectives(found.recurrences, options)
    return with_part_of_plain(options, plain, found.recurrences)


def _goes_on(takeover: Takeover, made: Callable[[Options], Graph], others: Others) -> Graph | None:
    """The graph of compiled segments, where all of them have taken over in programs of other lengths: nothing is
    compiled for it. None where some have not."""
    if takeover.compiled or takeover.only_lent or is_aside() or not others.spent.taken:
        return None
    with suppress(UnknownError, BudgetError), others.known.alone():
        graph = made(takeover.at_once)
        takeover.compiled = all(each.kernels in others.spent.taken for each in graph.built)
        return graph if takeover.compiled else None
    return None


@dataclass(slots=True)
class Others:
    """What programs of one model at several lengths share: kernels that are ``known``, the ``lengths`` of segments, and
    what they have spent. ``count``: how many there have been; what is around the loops of the first one is compiled."""

    known: Known = field(default_factory=Known)
    lengths: SegmentLengths = field(default_factory=partial(SegmentLengths, whole=True))
    spent: Spent = field(default_factory=Spent)
    count: int = 0

    def begun(self) -> bool:
        """Count a program; whether it is the first one."""
        self.count += 1
        return self.count == 1


def sample(found: Capture, options: Options, others: Others) -> None:
    """Note the sizes of some loops, for code that serves any: nothing is compiled."""
    with sampling(), others.lengths.kept():
        loops = [
            others.lengths.fixed(loop_kind(each), replace(each, any_length=True), options) for each in found.recurrences
        ]
        compile_usual(loops, options, len(loops))


def loop_kind(recurrence: Recurrence) -> Any:
    """What loops of one model have in common at all lengths, where they are one."""
    calls = (node for node in recurrence.step.graph.nodes if node.op.startswith("call"))
    return recurrence.where, tuple(str(node.target) for node in calls)


def _refuse_mode(mode: str | None) -> None:
    if mode not in (None, "default", "reduce-overhead"):
        raise OptionError(f"mode={mode!r} is not an option of reroll. Use options={{...}}: see reroll.Options.")


def _refuse(gm: fx.GraphModule, example_inputs: Sequence[Tensor]) -> None:
    """Refuse a graph by what is in it, and what it is given."""
    refuse_pieces(gm)
    refuse_in_place(gm)
    if any(isinstance(each, Tensor) and each.is_meta for each in example_inputs):
        raise UnsupportedError(f"reroll: {ON_META}")
    refuse_unguarded()


@functools.cache
def _say_how_to_unroll_less(unrecorded: bool) -> None:
    """Said once, for the first long loop."""
    instead = (
        "Leave out of the forward what a record does not tell (prints, files, values of tensors): then reroll.compile"
        if unrecorded
        else "reroll.compile(model)"
    )
    text = (
        f"Dynamo has unrolled a loop of {_LONG} steps or more, which takes it 10 to 150 ms a step, and does so again "
        f"for every other number of steps. {instead} records the model instead, and follows steps that repeat."
    )
    warn(text)


def _break(gm: fx.GraphModule) -> str:
    """Where and why Dynamo ended this graph before the model's end; empty if it did not."""
    ended: Any = getattr(gm, "compile_subgraph_reason", None)
    if ended is None or not ended.graph_break:
        return ""
    return broken(str(ended.reason), ended.user_stack)


def staged(takeover: Takeover, make: Callable[[Options], Graph], present: Graph | None = None) -> Graph:
    """The graph of the next call. Where one takes over, what the other was proved by stays, unless it is proved always:
    then its compiled segments are tried at each call."""
    made = takeover.made(make, present)
    if present is None or made is present or not takeover.summary or present.proof.how == "always":
        if present is not None and present.proof.proved is not None and made.proof.proved is None:
            made.proof.missed = f"no call with these segments was made yet; before, {present.proof.summary}"
        return made
    if present.proof.proved is not None:
        present.proof.proved = replace(present.proof.proved, segments=takeover.summary)
    return replace(made, proof=present.proof)


@dataclass(slots=True, eq=False)
class Program:
    """A graph, call after call: ``graph`` is that of the last one, ``make`` makes the one that may take over."""

    graph: Graph
    takeover: Takeover | None = None
    make: Callable[[Options], Graph] | None = None

    @without_hooks_of_all_modules()
    def next(self) -> Graph:
        """The graph of the next call. Raises Reached where that is only explained."""
        if self.takeover is not None and self.make is not None and self.takeover.due:
            with SELDOM_FULL:
                self.graph = staged(self.takeover, self.make, self.graph)
        self.graph.plans.follow()
        asked = EXPLAINING.get()
        if asked is not None:
            asked.reach(self.graph)
        return self.graph

    def run(self, *args: Any) -> Any:
        """Run the call that has come next."""
        if self.takeover is not None:
            self.takeover.note(self.graph.built)
        return self.graph.run(*args)


def _entry(program: Program, read: Read, plain: Callable[[], Compiled] | None) -> Compiled:
    """What Dynamo calls: runs the graph, or names it to whoever explains. ``plain`` gives what it is proved by."""
    written = changed_inputs(program.graph.module.graph)

    def entry(*args: Any) -> Any:
        read.refuse_changed()
        graph = program.next()
        with without_hooks_of_all_modules():
            if written:
                refuse_shared(args, written)
            if plain is not None and graph.proof.due and not is_aside():
                _prove(graph, plain(), args, written)
            return program.run(*args)

    return entry


def changed_inputs(graph: fx.Graph) -> frozenset[int]:
    """Numbers of the inputs that a graph changes, which it does at its end."""
    inputs = enumerate(graph.find_nodes(op="placeholder"))
    return frozenset(number for number, node in inputs if any(_changes(user, node) for user in node.users))


def _changes(user: fx.Node, node: fx.Node) -> bool:
    return user.op == "call_method" and user.target == "copy_" and user.args[0] is node


def refuse_shared(args: Sequence[Any], written: frozenset[int]) -> None:
    """Raise UnsupportedError where an input that is changed shares memory with another one, which then changes too."""
    tensors = [(number, each) for number, each in enumerate(args) if isinstance(each, Tensor)]
    for group in overlapping([extent(each) for _, each in tensors]):
        if written.intersection(tensors[place][0] for place in group):
            raise UnsupportedError(
                "The model changes a tensor in place that shares memory with another one of those that it reads "
                "(views of one tensor, or windows of one array). Here the other one would stay as it was. Pass or keep "
                "a copy of one of them (clone())."
            )


def _without_graph(gm: fx.GraphModule) -> nn.Module:
    """What a graph module holds, but for its graph, which is large."""
    bare = nn.Module()
    vars(bare).update({name: value for name, value in vars(gm).items() if name not in ("_graph", "meta")})
    return bare


def assemble(gm: nn.Module, outer: fx.Graph, modules: Mapping[str, nn.Module]) -> fx.GraphModule:
    """The outer graph with its recurrences as modules."""
    one_by_one(outer, modules)
    run_by_torch(outer, gm)
    root = nn.Module()
    for name in {str(node.target) for node in outer.find_nodes(op="get_attr")}:
        _set_attribute(root, name, _attribute(gm, name))
    for name, module in modules.items():
        root.add_module(name, module)
        if isinstance(module, RecurrenceModule):
            module.shown, module.unbound = shown_results(outer, name), unbound_results(outer, name)
    as_collected(outer, modules)
    return fx.GraphModule(root, outer)


def _attribute(module: nn.Module, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _set_attribute(root: nn.Module, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    setattr(root, last, value)


def _prove(graph: Graph, plain: Compiled, args: Sequence[Any], written: frozenset[int]) -> None:
    """Prove a graph on the inputs of a call. Raises ProofError."""
    names = _names(graph.module.graph)
    named, proof = dict(zip(names, args, strict=True)), graph.proof
    shown = partial(shown_by, args=named, written=[names[number] for number in written], proof=proof)
    with in_silence():  # other processes do not prove the same at this call
        proof.prove(lambda: shown(plain, plainly=True), lambda run: shown(run, plainly=False))


def _names(graph: fx.Graph) -> list[str]:
    """The inputs of Dynamo's graph as people know them (``cell.weight``); as it does where two have one name so."""
    own = [node.name for node in graph.find_nodes(op="placeholder")]
    bare = (name.removeprefix("l_self_").removeprefix("l_") for name in own)
    said = [re.sub(r"_?(?:modules|parameters|buffers)_", ".", name).strip("._") for name in bare]
    return said if len({*said}) == len(said) else own


def _plainly(gm: fx.GraphModule) -> Compiled:
    """The graph as torch runs it, operation by operation."""
    plain = without_regions(gm)
    run_by_torch(plain.graph, plain)
    plain.recompile()
    return plain.forward


def _by_torch(gm: fx.GraphModule, example_inputs: Sequence[Tensor], options: Options) -> Compiled:
    """The graph without reroll: as inductor compiles it, or as it is."""
    if options.lowering == "eager":
        return _plainly(gm)
    with refused_by_inductor("a graph without a loop, which reroll leaves to it"):
        return compile_whole(gm, example_inputs)
