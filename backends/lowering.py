"""A segment of k steps as two compiled functions: forward with its tape, and backward.

The joint graph of the segment is traced once by AOTAutograd, cut into a forward and a backward by ``reroll.partition``,
and run either by torch (``eager``) or as inductor kernels. There is one forward only: first run, replay and taping call
the same kernels on the same boundaries, so that what decides later steps is bit-identical in all of them.

Private torch API, tried on 2.11 and 2.13: ``aot_export_joint_simple`` (a functional joint graph of forward and
backward), ``joint_graph_passes`` (random numbers for inductor), ``compile_fx_inner`` (inductor without AOTAutograd
around it), ``_BoxedCodeGen`` (a graph's inputs are freed after their last use), ``TracingContext`` (keeps this trace
apart from Dynamo's).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from reroll.errors import CaptureError, CompilerMissingError
from reroll.packing import pack_saved
from reroll.partition import partition
from reroll.recurrence import Items, Numbers, Recurrence, Slices
from reroll.sparsity import Fact, infer_carries

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """``steps`` compiled steps.

    forward: boxed; carries, xs, constants -> next carries, ys, saved. backward: boxed; saved, gradients of the
    differentiable outputs -> one gradient per differentiable input. ``tangents`` and ``inputs`` number those outputs
    and inputs; ``reaches[i]`` are the outputs whose gradients reach the gradient of ``inputs[i]``. ``saved_nbytes`` is what the tape holds beyond inputs; ``scratch_nbytes`` the most a run needs besides.
    """

    steps: int
    forward: Boxed
    backward: Boxed | None
    outputs: int
    tangents: tuple[int, ...]
    inputs: tuple[int, ...]
    reaches: tuple[frozenset[int], ...]
    output_examples: tuple[torch.Tensor, ...]
    saved_nbytes: int
    forward_graph: fx.GraphModule
    backward_graph: fx.GraphModule | None


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """The joint graph of a segment, before it is cut and compiled."""

    steps: int
    graph: fx.GraphModule
    mode: FakeTensorMode
    outputs: int
    tangents: tuple[int, ...]
    inputs: tuple[int, ...]
    inputs_total: int
    results: tuple[torch.Tensor, ...]
    carries: int

    @property
    def random(self) -> bool:
        """Whether the segment draws random numbers."""
        tag = torch.Tag.nondeterministic_seeded
        return any(tag in getattr(node.target, "tags", ()) for node in self.graph.graph.nodes)

    def facts(self) -> tuple[Fact, ...]:
        """What is proved of each tensor of the carry."""
        placeholders = self.graph.graph.find_nodes(op="placeholder")
        results: Any = self.graph.graph.output_node().args[0]
        return infer_carries(self.graph.graph, placeholders[: self.carries], results[: self.carries])


def segment_inputs(recurrence: Recurrence, operands: Sequence[Any], start: int, steps: int) -> list[Any]:
    """The per-step inputs and constants of steps [start, start + steps): views of the operands, numbers as tensors."""
    inputs: list[Any] = []
    for x in recurrence.xs:
        if isinstance(x, Slices):
            inputs.append(time_slice(operands[x.operand], x, start, steps))
        elif isinstance(x, Items):
            inputs += [operands[i] for i in x.operands[start : start + steps]]
        else:
            inputs.append(torch.tensor(x.values[start : start + steps], dtype=x.dtype))
    return inputs + [operands[i] for i in recurrence.constants]


def time_slice(base: torch.Tensor, x: Slices, start: int, steps: int) -> torch.Tensor:
    """Steps [start, start + steps) of a tensor, in rising order of the index."""
    ends = (x.start + x.stride * start, x.start + x.stride * (start + steps - 1))
    index = slice(min(ends), max(ends) + 1, abs(x.stride))
    return base[(slice(None),) * x.dim + (index,)]


def _at(recurrence: Recurrence, inputs: Sequence[Any], t: int, steps: int) -> list[Any]:
    """Step t's per-step inputs and constants, out of those of a segment."""
    found, at = [], 0
    for x in recurrence.xs:
        if isinstance(x, Slices):
            found.append(inputs[at].select(x.dim, t if x.stride > 0 else steps - 1 - t))
        elif isinstance(x, Numbers):
            found.append(inputs[at][t])
        else:
            found.append(inputs[at + t])
        at += steps if isinstance(x, Items) else 1
    return [*found, *inputs[at:]]


def trace(recurrence: Recurrence, steps: int, *, decompose: bool) -> Traced:
    """The functional joint graph of ``steps`` steps."""
    mode = FakeTensorMode()
    carried = len(recurrence.carries)
    with tracing(TracingContext(mode)), mode_of(recurrence):
        examples = [_fake(mode, example) for example in recurrence.examples]
        inputs = segment_inputs(recurrence, examples, 0, steps)
        fakes = [_fake(mode, value) for value in [*(e.contiguous() for e in examples[:carried]), *inputs]]
        _settle_gradients(recurrence, fakes, steps)
        function = _segment_function(recurrence, steps)
        results = function(*fakes)
        tangents = tuple(i for i, value in enumerate(results) if value.requires_grad)
        graph = _export(function, fakes, recurrence, decompose=decompose, joint=bool(tangents))
    grads: Any = graph.graph.output_node().args[0][len(results) :]  # type: ignore[index]
    inputs_with_grad = tuple(i for i, grad in enumerate(grads) if grad is not None)
    return Traced(steps, graph, mode, len(results), tangents, inputs_with_grad, len(fakes), tuple(results), carried)


def mode_of(recurrence: Recurrence) -> contextlib.ExitStack:
    """The gradient and autocast modes around the loop, as they were in the user's code."""
    stack = contextlib.ExitStack()
    stack.enter_context(torch.set_grad_enabled(recurrence.grad_enabled))
    for device, dtype, enabled, cache in recurrence.autocast:
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))  # type: ignore[arg-type]
    return stack


def _fake(mode: FakeTensorMode, example: torch.Tensor) -> torch.Tensor:
    """A fake of ``mode`` with the layout of an example (which may be another mode's fake)."""
    with mode:
        fake = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
    return fake.requires_grad_(example.requires_grad)


def _settle_gradients(recurrence: Recurrence, fakes: list[torch.Tensor], steps: int) -> None:
    """A carry needs a gradient if its initial value does or the step makes one that does: a fixpoint."""
    carried = len(recurrence.carries)
    for _ in range(carried + 1):
        results = recurrence.step(*fakes[:carried], *_at(recurrence, fakes[carried:], 0, steps))
        grown = False
        for fake, result in zip(fakes[:carried], results[:carried], strict=True):
            if result.requires_grad and not fake.requires_grad:
                fake.requires_grad_(True)
                grown = True
        if not grown:
            return


def _segment_function(recurrence: Recurrence, steps: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    carried = len(recurrence.carries)

    def segment(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        carries, ys = list(args[:carried]), []
        for t in range(steps):
            results = recurrence.step(*carries, *_at(recurrence, args[carried:], t, steps))
            carries = list(results[:carried])
            ys.append(results[carried:])
        return (*_own(carries), *(torch.stack(rows) for rows in zip(*ys, strict=True)))

    return segment


def _own(carries: list[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous carries that share memory with nothing."""
    return [carry.clone(memory_format=torch.contiguous_format) for carry in carries]


def _export(
    function: Callable[..., Any], fakes: list[torch.Tensor], recurrence: Recurrence, *, decompose: bool, joint: bool
) -> fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table() if decompose else None
    try:
        graph = aot_export_joint_simple(function, tuple(fakes), trace_joint=joint, decompositions=table)
    except RuntimeError as error:
        raise CaptureError(
            f"The step at {recurrence.where} could not be traced with its gradient: {error}. Simplify the step, or "
            "leave this model to another backend."
        ) from error
    assert isinstance(graph, fx.GraphModule)
    graph.graph.eliminate_dead_code()
    return graph


def lower(traced: Traced, lowering: str, codec: str) -> Segment:
    """Cut a joint graph and compile its halves."""
    if lowering == "inductor":
        _prepare_for_inductor(traced)
    forward, backward, saved_nbytes = _halves(traced, lowering, codec)
    compiled = _inductor if lowering == "inductor" else _eager
    return Segment(
        steps=traced.steps,
        forward=compiled(forward, traced, backward=False),
        backward=None if backward is None else compiled(backward, traced, backward=True),
        outputs=traced.outputs,
        tangents=traced.tangents,
        inputs=traced.inputs,
        reaches=reaches(traced),
        output_examples=traced.results,
        saved_nbytes=saved_nbytes,
        forward_graph=forward,
        backward_graph=backward,
    )


def reaches(traced: Traced) -> tuple[frozenset[int], ...]:
    """For each differentiable input, the outputs whose gradients its own gradient is made of."""
    graph = traced.graph.graph
    placeholders = [node for node in graph.find_nodes(op="placeholder") if "tangents" in str(node.target)]
    found = {node: frozenset({output}) for node, output in zip(placeholders, traced.tangents, strict=True)}
    for node in graph.nodes:
        if node not in found and node.op != "output":
            found[node] = frozenset().union(*(found[source] for source in node.all_input_nodes))
    results: Any = graph.output_node().args[0]
    return tuple(found[results[traced.outputs + index]] for index in traced.inputs)


def _halves(traced: Traced, lowering: str, codec: str) -> tuple[fx.GraphModule, fx.GraphModule | None, int]:
    if not traced.tangents:
        return traced.graph, None, 0
    held = set(range(traced.carries, traced.inputs_total))
    cut = partition(traced.graph, traced.outputs, held, recompute=lowering == "inductor", pack=codec == "auto")
    forward, backward = cut.forward, cut.backward
    if codec == "auto":
        forward, backward = pack_saved(forward, backward, traced.outputs, cut.facts)
    return forward, backward, saved_bytes(forward, traced.outputs)


def saved_bytes(forward: fx.GraphModule, outputs: int) -> int:
    """Bytes that a forward's saved tensors hold, inputs left out."""
    results: Any = forward.graph.output_node().args[0]
    storages: dict[int, int] = {}
    for node in results[outputs:]:
        if node.op == "placeholder" or _views_input(node):
            continue
        value = node.meta["val"]
        storages[id(node)] = value.numel() * value.element_size()
    return sum(storages.values())


def _views_input(node: fx.Node) -> bool:
    """Whether a node is a view of an input, directly or through other views."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _prepare_for_inductor(traced: Traced) -> None:
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(traced.mode):
        joint_graph_passes(traced.graph)


def _eager(graph: fx.GraphModule, traced: Traced, *, backward: bool) -> Boxed:
    from torch.fx.graph import _BoxedCodeGen

    boxed = fx.GraphModule(graph, graph.graph)
    boxed.graph.set_codegen(_BoxedCodeGen())
    boxed.recompile()
    return boxed.forward


def _inductor(graph: fx.GraphModule, traced: Traced, *, backward: bool) -> Boxed:
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    if any(value.device.type == "cpu" for value in inputs):
        _need_compiler()
    with tracing(TracingContext(traced.mode)), V.set_fake_mode(traced.mode), torch.no_grad():
        return compile_fx_inner(graph, inputs, is_backward=backward)


def _need_compiler() -> None:
    """Raise CompilerMissingError where inductor would find no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise CompilerMissingError(
            "lowering='inductor' needs a C++ compiler, and none was found. Install one (g++ or clang++), name it in the "
            'environment variable CXX, or use lowering="eager", which needs none.'
        ) from error
