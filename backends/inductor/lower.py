"""A segment of k steps as two compiled functions: forward with its tape, and backward.

The joint graph of the segment is cut into a forward and a backward by ``reroll.segment.cut``, and run either by torch
(``eager``) or as inductor kernels. There is one forward only: first run, replay and taping call the same kernels
on the same boundaries, so that what decides later steps is bit-identical in all of them. Where its outputs take work of
their own, it is two functions (``Halved``), and a tape that is made again stops after the first.

Private torch API, tried on 2.11 and 2.13: ``joint_graph_passes`` (random numbers for inductor), ``_BoxedCodeGen`` (a
graph's inputs are freed after their last use), ``V`` (whose fake mode inductor reads), ``get_cpp_compiler`` and
``InvalidCxxCompiler`` (whether there is a compiler).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import fx

from reroll.backends.inductor.event_counts import Watch
from reroll.backends.inductor.force_realize import store_repeated
from reroll.backends.inductor.half import Code
from reroll.backends.inductor.native_products import register, stamp, vectors
from reroll.backends.inductor.sizes.family import compiled
from reroll.backends.inductor.wrapper_codegen.unit import Unit
from reroll.errors import CompilerMissingError
from reroll.graph.editing import deduplicate, primals_and_tangents
from reroll.graph.fakes import outside_dynamo
from reroll.graph.names import take_names
from reroll.graph.work import work
from reroll.program.tried import blamed_on, guarded, passes_in
from reroll.segment.cut.late import make_late
from reroll.segment.cut.partition import Cut, partition
from reroll.segment.cut.policy import NO_POLICY, Policy, StepValue
from reroll.segment.cut.selective_recompute import Thin, thinner
from reroll.segment.cut.split_forward import InTwo, without_outputs
from reroll.segment.factors import Product, defer_products, handing_over
from reroll.segment.invariants import Once
from reroll.segment.packing import pack_saved
from reroll.segment.trace import Traced

_SMALL = 0.1
Boxed = Callable[[list[Any]], Sequence[Any]]


class ExtraOperands(NamedTuple):
    """Operands of a half beside those of its step: rows that event products count in, and invariants of the loop."""

    counts: tuple[int, ...] = ()
    once: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Interpreted:
    """A half that torch runs node by node: ``graph`` as it is run. ``hands_over``: see ``Segment``."""

    graph: fx.Graph
    call: Boxed
    hands_over: bool

    @classmethod
    def of(cls, half: fx.GraphModule, *, hands_over: bool) -> Interpreted:
        """A half, whose inputs are freed after their last use."""
        from torch.fx.graph import _BoxedCodeGen

        run = guarded(half.graph)
        run.set_codegen(_BoxedCodeGen())
        return cls(half.graph, fx.GraphModule(half, run).forward, hands_over)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """The results. Empties the list of inputs."""
        return self.call(inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Halved:
    """A forward of two functions, called as one; ``parts`` are their graphs."""

    parts: InTwo
    taping: Boxed
    rest: Boxed

    @classmethod
    def of(cls, parts: InTwo, compiled: Callable[..., Boxed]) -> Halved:
        """The two, each compiled."""
        return cls(parts, compiled(parts.taping, backward=False), compiled(parts.rest, backward=False))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Outputs, then saved values. Empties the list of inputs."""
        held = [inputs[number] for number in self.parts.inputs]
        results = self.taping(inputs)
        held += [results[number] for number in self.parts.results]
        saved = list(results[: self.parts.saved])
        del results
        return [*self.rest(held), *saved]

    def saved(self, inputs: list[Any]) -> list[Any]:
        """The saved values alone. Empties the list of inputs."""
        return list(self.taping(inputs)[: self.parts.saved])


@dataclass(frozen=True, eq=False)
class ThinTape:
    """A tape of fewer values, ``keeps`` by their numbers among what the forward saves, and its backward, which repeats
    products (``reroll.segment.cut.selective_recompute``). It is compiled when it is first asked for.

    ``whole``: how many of the saved values the whole tape has. ``repeats``: the work that it repeats, as a part of that
    of a forward. ``alone``: that of a tape that is made again without its outputs.
    """

    keeps: tuple[int, ...]
    whole: int
    repeats: float
    alone: float
    backward_graph: fx.GraphModule
    compiled: Callable[[fx.GraphModule], Boxed]

    @classmethod
    def of(
        cls,
        thin: Thin | None,
        forward: fx.GraphModule,
        parts: InTwo | None,
        compiled: Callable[[fx.GraphModule], Boxed],
    ) -> ThinTape | None:
        """A thin tape, if there is one, with what it costs beside a forward, which may run in two parts."""
        if thin is None:
            return None
        run = work(forward.graph)
        alone = work(parts.taping.graph) / run if parts else 1.0
        return cls(thin.keeps, thin.whole, thin.work / run, alone, thin.backward, compiled)

    @cached_property
    def backward(self) -> Boxed:
        """Boxed; what is kept, gradients of the differentiable outputs -> what the backward of the segment gives."""
        return self.compiled(self.backward_graph)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """``steps`` compiled steps.

    forward: boxed; carries, xs, constants -> next carries, ys, saved. backward: boxed; saved, gradients of the
    differentiable outputs -> one gradient per differentiable input. ``tangents`` and ``inputs`` number those outputs
    and inputs; ``reaches[i]`` are the outputs from which autograd reaches ``inputs[i]``. ``extra_forward``
    and ``extra_backward`` are their last operands. A gradient in ``products`` is None: it is a product of further
    results. ``tape`` are the saved values, before what is 0 or 1 is packed. ``thin``: the tape that holds fewer, if
    there is one.
    """

    steps: int
    forward: Boxed
    backward: Boxed | None
    outputs: int
    tangents: tuple[int, ...]
    inputs: tuple[int, ...]
    reaches: tuple[frozenset[int], ...]
    output_examples: tuple[torch.Tensor, ...]
    forward_graph: fx.GraphModule
    backward_graph: fx.GraphModule | None
    extra_forward: ExtraOperands
    extra_backward: ExtraOperands
    products: Mapping[int, Product] = field(default_factory=dict)
    tape: tuple[StepValue, ...] = ()
    thin: ThinTape | None = None

    @property
    def unbuilt(self) -> list[Unit]:
        """The kernels of both halves that are not built."""
        parts = (self.forward.taping, self.forward.rest) if isinstance(self.forward, Halved) else (self.forward,)
        return [each.unit for each in (*parts, self.backward) if isinstance(each, Code) and each.unit.places]

    @property
    def hands_over(self) -> bool:
        """Whether backwards take a ``Taker`` last, and hand gradients to it in place of giving them."""
        return isinstance(self.backward, Interpreted) and self.backward.hands_over

    @property
    def saved_inputs(self) -> dict[int, int]:
        """The inputs that the forward saves as they are: their places, by their numbers among what it saves. Without a
        backward it saves none."""
        if self.backward is None:
            return {}
        places = {node: at for at, node in enumerate(self.forward_graph.graph.find_nodes(op="placeholder"))}
        results: Any = self.forward_graph.graph.output_node().args[0]
        return {number: places[node] for number, node in enumerate(results[self.outputs :]) if node in places}

    def kept(self, saved: list[Any], thin: bool) -> list[Any]:
        """What a tape holds of all that the forward saves."""
        if self.thin is None:
            return saved
        return [saved[number] for number in self.thin.keeps] if thin else saved[: self.thin.whole]


def prepare(traced: Traced, lowering: str) -> None:
    """What is done to a joint graph before it is cut: equal nodes become one, names go to the nodes that they name."""
    if lowering == "inductor":
        _prepare_for_inductor(traced)
    take_names(traced.graph.graph)
    deduplicate(traced.graph.graph)


def has_vectors(lowering: str, device: torch.device) -> bool:
    """Whether segments are compiled for a CPU whose vectors our kernels are made for. Raises CompilerMissingError."""
    if lowering != "inductor" or device.type != "cpu":
        return False
    _need_compiler()
    return vectors()


def cut_both_ways(traced: Traced, lowering: str, codec: str, policy: Policy = NO_POLICY) -> tuple[Cut, Cut] | None:
    """A joint graph, cut so that its backward replays no products, and so that it does; nothing unless so little is
    kept then that a tape of all steps is small: a tenth of plain's."""
    if not traced.tangents:
        return None
    way = partial(_cut, traced, policy, pack=_packs(lowering, codec))
    replayed = way(replay=True)
    small = 0 < replayed.kept <= _SMALL * replayed.plain < float("inf")
    return (way(replay=False), replayed) if small else None


def lower(
    traced: Traced,
    lowering: str,
    codec: str,
    policy: Policy,
    *,
    replay: bool,
    again: bool,
    thin: bool,
    recorded: bool,
    rewrite: Callable[[fx.GraphModule], fx.GraphModule],
    watch: Watch,
    once: Once,
) -> Segment:
    """Cut a prepared joint graph, ``rewrite`` its halves, and compile them.

    ``again``: segments may run again for their tape alone, and are not recorded. ``thin``: tapes may be thin.
    ``recorded``: halves may be. ``watch`` is told of event products, ``once`` takes what need be made only once per
    call.
    """
    *halves, tape = _halves(traced, policy, pack=_packs(lowering, codec), replay=replay)
    forward, backward = (half and rewrite(half) for half in halves)
    assert forward is not None
    constants = _constants_reached(traced)
    extra_forward, extra_backward = (
        _extra_operands(forward, [], watch, once),
        _extra_operands(backward, constants, watch, once),
    )
    products = {} if backward is None else defer_products(backward, list(map(bool, constants)))
    lowered = _lowered(traced, lowering, None if recorded else products)
    thinned = _thinned(traced, forward, backward) if thin and backward else None
    parts = without_outputs(forward, traced.outputs) if again and backward else None
    return Segment(
        steps=traced.steps,
        forward=Halved.of(parts, lowered) if parts else lowered(forward, backward=False),
        backward=lowered(backward, backward=True) if backward else None,
        outputs=traced.outputs,
        tangents=traced.tangents,
        inputs=traced.inputs,
        reaches=traced.reaches,
        output_examples=traced.results,
        forward_graph=forward,
        backward_graph=backward,
        extra_forward=extra_forward,
        extra_backward=extra_backward,
        products=products,
        tape=tape,
        thin=ThinTape.of(thinned, forward, parts, partial(lowered, backward=True)),
    )


def _constants_reached(traced: Traced) -> list[str]:
    """For each input that a gradient goes to the name of the constant that it is, or nothing."""
    primals = primals_and_tangents(traced.graph.graph)[0]
    return [primals[number].meta.get("constant", "") for number in traced.inputs]


def _lowered(traced: Traced, lowering: str, products: Mapping[int, Product] | None) -> Callable[..., Boxed]:
    """What compiles a half; with ``products`` a backward that torch runs hands its gradients over."""
    return partial(_inductor, traced=traced) if lowering == "inductor" else partial(_eager, traced, products)


def _handed(traced: Traced) -> list[bool]:
    """For each input that a gradient goes to whether that is added up over the steps: it is no carry."""
    primals = primals_and_tangents(traced.graph.graph)[0]
    return ["carry" not in primals[number].meta for number in traced.inputs]


def _extra_operands(half: fx.GraphModule | None, names: Sequence[str], watch: Watch, once: Once) -> ExtraOperands:
    return ExtraOperands() if half is None else ExtraOperands(watch.add(half, names), once.take(half))


def _thinned(traced: Traced, forward: fx.GraphModule, backward: fx.GraphModule) -> Thin | None:
    """The thin tape of two halves, if there is one; the forward gives what that needs of its inputs, too."""
    found = thinner(forward, backward, traced.outputs, range(traced.carries, traced.inputs_total))
    if found is None:
        return None
    output, operands = forward.graph.output_node(), forward.graph.find_nodes(op="placeholder")
    results: Any = output.args[0]
    output.args = ((*results, *(operands[number] for number in found.more)),)
    forward.recompile()
    return found


def _packs(lowering: str, codec: str) -> bool:
    """Unfused, packing takes longer than the step: eager keeps bools."""
    return codec != "none" and lowering == "inductor"


def _cut(traced: Traced, policy: Policy = NO_POLICY, *, pack: bool, replay: bool) -> Cut:
    held = set(range(traced.carries, traced.inputs_total))
    return partition(traced.graph, traced.outputs, held, policy, pack=pack, replay=replay)


def halves_of(
    traced: Traced, lowering: str, codec: str, policy: Policy = NO_POLICY, *, replay: bool
) -> list[fx.GraphModule]:
    """The forward of a prepared joint graph, and its backward if there is one, before passes rewrite them."""
    forward, backward, _ = _halves(traced, policy, pack=_packs(lowering, codec), replay=replay)
    return [forward] if backward is None else [forward, backward]


def _halves(
    traced: Traced, policy: Policy = NO_POLICY, *, pack: bool, replay: bool
) -> tuple[fx.GraphModule, fx.GraphModule | None, tuple[StepValue, ...]]:
    """Forward, backward, and what goes from one to the other."""
    if not traced.tangents:
        return traced.graph, None, ()
    cut = _cut(traced, policy, pack=pack, replay=replay)
    if not pack:
        return cut.forward, cut.backward, cut.tape
    return *pack_saved(cut.forward, cut.backward, traced.outputs, cut.facts), cut.tape


def _prepare_for_inductor(traced: Traced) -> None:
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with outside_dynamo(traced.mode), V.set_fake_mode(traced.mode):
        joint_graph_passes(traced.graph)


def _eager(traced: Traced, products: Mapping[int, Product] | None, graph: fx.GraphModule, *, backward: bool) -> Boxed:
    hands_over = backward and products is not None
    if backward:
        make_late(graph)
    made = handing_over(graph, _handed(traced), products or {}) if hands_over else graph
    return Interpreted.of(made, hands_over=hands_over)


def _inductor(graph: fx.GraphModule, traced: Traced, *, backward: bool) -> Boxed:
    from torch.fx.graph import CodeGen

    graph.graph.set_codegen(CodeGen())  # a step without gradients is not cut, and has that of its trace
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    if any(value.device.type == "cpu" for value in inputs):
        _need_compiler()
    register()
    stamp(graph)
    store_repeated(graph)
    passes = passes_in(graph.graph)
    with (
        blamed_on(" and ".join(passes), "a half of a segment that inductor cannot compile") if passes else nullcontext()
    ):
        return compiled(graph, traced.mode, backward=backward)


def _need_compiler() -> None:
    """Raise CompilerMissingError where inductor would find no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise CompilerMissingError(
            "lowering='inductor' needs a C++ compiler, and none was found. Install one (g++ or clang++), name it in "
            'the environment variable CXX, or use lowering="eager", which needs none.'
        ) from error
