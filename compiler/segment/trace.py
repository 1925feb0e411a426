"""The functional joint graph of a segment of k steps.

Private torch API, tried on 2.11 and 2.13: ``FakeTensorMode`` (shapes without memory).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from reroll.graph.editing import primals_and_tangents
from reroll.graph.fakes import fake_of, outside_dynamo
from reroll.graph.private import is_seeded, storage_id
from reroll.recurrence import Items, Numbers, Recurrence, Slices, Slots
from reroll.segment.joint.cells import WithoutUpdates
from reroll.segment.joint.graph import joint_graph, operations_seen
from reroll.segment.linear.cores import Core, candidates, cores
from reroll.segment.linear.steps import LINEAR, run_steps
from reroll.segment.sparsity import Fact, infer_carries


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """The joint graph of a segment, before it is cut and compiled.

    ``reaches[i]`` are the outputs from which autograd reaches ``inputs[i]``: the joint graph does not tell, as a
    gradient may depend on no other (a penalty that adds a constant). ``results`` are examples of the outputs, and
    ``facts`` what is proved of each tensor of the carry.
    """

    steps: int
    graph: fx.GraphModule
    mode: FakeTensorMode
    outputs: int
    tangents: tuple[int, ...]
    inputs: tuple[int, ...]
    inputs_total: int
    reaches: tuple[frozenset[int], ...]
    results: tuple[torch.Tensor, ...]
    carries: int
    facts: tuple[Fact, ...]

    @property
    def random(self) -> bool:
        """Whether the segment draws random numbers."""
        return any(map(is_seeded, self.graph.graph.nodes))


def segment_inputs(recurrence: Recurrence, operands: Sequence[Any], start: int, steps: int) -> list[Any]:
    """The per-step inputs and constants of steps [start, start + steps), laid out as segments take them."""
    read = step_inputs(recurrence, operands, numbers_of(recurrence), start, steps)
    rows = dict(recurrence.loose_rows(steps))
    laid_out = (packed(x) if place in rows else x for place, x in enumerate(read, start=len(recurrence.carries)))
    return [*laid_out, *(operands[i] for i in recurrence.constants)]


def numbers_of(recurrence: Recurrence) -> Mapping[int, torch.Tensor]:
    """The numbers of all steps, by which of the per-step inputs they are."""
    where = recurrence.numbers_on
    read = ((place, x) for place, x in enumerate(recurrence.xs) if isinstance(x, Numbers))
    with torch.inference_mode(False):
        return {place: torch.tensor(x.values, dtype=x.dtype, device=where) for place, x in read}


def step_inputs(
    recurrence: Recurrence, operands: Sequence[Any], numbers: Mapping[int, Any], start: int, steps: int
) -> list[Any]:
    """The per-step inputs of steps [start, start + steps): views of the operands, and of the numbers of all steps."""
    inputs: list[Any] = []
    for place, x in enumerate(recurrence.xs):
        if isinstance(x, Slices):
            inputs.append(time_slice(operands[x.operand], x, start, steps))
        elif isinstance(x, Items):
            inputs += [operands[i] for i in x.operands[start : start + steps]]
        else:
            inputs.append(numbers[place].narrow(0, start, steps))
    return inputs


def time_slice(base: torch.Tensor, x: Slices, start: int, steps: int) -> torch.Tensor:
    """Steps [start, start + steps) of a tensor, in rising order of the index."""
    if x.stride == 1:
        return base.narrow(x.dim, x.start + start, steps)
    ends = (x.start + x.stride * start, x.start + x.stride * (start + steps - 1))
    index = slice(min(ends), max(ends) + 1, abs(x.stride))
    return base[(slice(None),) * x.dim + (index,)]


def dense(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides without gaps, in the order of the given ones; an expanded dimension stays so."""
    found, step = [0] * len(sizes), 1
    for at in sorted(range(len(sizes)), key=lambda at: (strides[at], -at)):
        if strides[at] or sizes[at] == 1:
            found[at] = step
            step *= max(sizes[at], 1)
    return found


def lies_packed(base: torch.Tensor, x: Slices, steps: int) -> bool:
    """Whether so many steps of a tensor lie without gaps in it, which may be shorter."""
    sizes, strides = [*base.shape], [*base.stride()]
    sizes[x.dim], strides[x.dim] = steps, strides[x.dim] * abs(x.stride)
    rows = torch.empty_strided(sizes, strides, dtype=base.dtype, device="meta")
    return packed(rows) is rows


def packed(value: torch.Tensor) -> torch.Tensor:
    """The value in a layout without gaps; itself where it has that."""
    if value.is_contiguous():
        return value
    strides = dense(value.shape, value.stride())
    if list(value.stride()) == strides:
        return value
    made = value.new_empty_strided(value.shape, strides)
    once = tuple(slice(None if step else 1) for step in strides)
    made[once].copy_(value[once])  # what is expanded is one memory, which may be written once
    return made


def _at(slots: Slots, inputs: Sequence[Any], t: int) -> list[Any]:
    """Step t's per-step inputs and constants, out of the inputs of a segment."""
    found = []
    for places, x in slots.xs:
        if isinstance(x, Slices):
            found.append(inputs[places[0]].select(x.dim, t if x.stride > 0 else slots.steps - 1 - t))
        else:
            found.append(inputs[places[t]] if isinstance(x, Items) else inputs[places[0]][t])
    return [*found, *inputs[slots.constants.start :]]


def first_step(recurrence: Recurrence, operands: Sequence[torch.Tensor]) -> list[Any]:
    """What the step of a recurrence takes when it runs first."""
    carries = operands[: len(recurrence.carries)]
    return [*carries, *_at(recurrence.slots(1), [*carries, *segment_inputs(recurrence, operands, 0, 1)], 0)]


def step_of(
    recurrence: Recurrence,
    carries: Sequence[Any],
    operands: Sequence[torch.Tensor],
    numbers: Mapping[int, Any],
    step: int,
) -> list[Any]:
    """What a step of a recurrence takes, with these carries."""
    read = step_inputs(recurrence, operands, numbers, step, 1)
    constants = (operands[i] for i in recurrence.constants)
    return [*carries, *_at(recurrence.slots(1), [*carries, *read, *constants], 0)]


def trace_mode() -> FakeTensorMode:
    """Where a segment is traced. Without an environment of shapes inductor keeps no graph on disk; none of its shapes
    may depend on data."""
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(shape_env=shapes, static_shapes=True)


def trace_inputs(recurrence: Recurrence, mode: FakeTensorMode, steps: int) -> list[torch.Tensor]:
    """Fake tensors like the carries, the per-step inputs and the constants of a segment, as it is traced."""
    examples = [fake_of(mode, example) for example in recurrence.examples]
    inputs = [*_example_inputs(recurrence, examples, steps), *(examples[i] for i in recurrence.constants)]
    contiguous = (example.contiguous() for example in examples[: len(recurrence.carries)])
    return [fake_of(mode, value) for value in [*contiguous, *inputs]]


def input_layouts(recurrence: Recurrence, steps: int) -> tuple[Any, ...]:
    """What ``trace_inputs`` are, without making them: equal where these are alike, but for which memory they lie in."""
    examples, carried = recurrence.examples, len(recurrence.carries)
    found: list[Any] = [(_layout(each), each.is_contiguous()) for each in examples[:carried]]
    for x in recurrence.xs:
        if isinstance(x, Numbers):
            found.append((x.dtype, recurrence.numbers_on))
        elif isinstance(x, Items):
            found.append(tuple(_layout(examples[i]) for i in x.operands[:steps]))
        else:
            sizes, strides = [*examples[x.operand].shape], [*examples[x.operand].stride()]
            sizes[x.dim] = steps
            if recurrence.any_length:
                strides = dense(sizes, strides)
            else:
                strides[x.dim] *= abs(x.stride)
            found.append((tuple(sizes), tuple(strides), *_layout(examples[x.operand])[2:]))
    return (*found, *(_layout(examples[i]) for i in recurrence.constants))


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    """All of an example but its memory."""
    kind = value.dtype, value.device, value.layout, value.requires_grad, value.is_conj(), value.is_neg()
    return tuple(value.shape), value.stride(), *kind


def step_examples(recurrence: Recurrence, mode: FakeTensorMode) -> list[Any]:
    """What one step takes, without memory."""
    fakes, slots = trace_inputs(recurrence, mode, 1), recurrence.slots(1)
    return [*fakes[: len(recurrence.carries)], *_at(slots, fakes, 0)]


def trace(recurrence: Recurrence, steps: int, *, decompose: bool) -> Traced:
    """The functional joint graph of ``steps`` steps."""
    mode, carried, slots = trace_mode(), len(recurrence.carries), recurrence.slots(steps)
    with outside_dynamo(mode), recurrence.modes(), WithoutUpdates():
        fakes = trace_inputs(recurrence, mode, steps)
        together = linear_carries(recurrence) if recurrence.step.meta.get(LINEAR) and steps > 1 else ()
        run = _segment_function(recurrence, slots, together)
        with mode, operations_seen(recurrence.step) as look:
            _settle_gradients(recurrence, fakes, slots)
            results = run(*fakes)
            shared = _shared(results[:carried], fakes)
            results = _own(results, shared)
        tangents = tuple(i for i, value in enumerate(results) if value.requires_grad)
        reached = [_leaves_of(results[i]) for i in tangents]
        ends = [results[i] for i in tangents]
        function, copying = (partial(_run_with_own, run, each) for each in (shared, frozenset(range(carried))))
        own = [number for number in range(carried) if number not in shared]
        graph = joint_graph(function, copying, own, fakes, ends, recurrence, decompose=decompose, look=look)
    _mark(primals_and_tangents(graph.graph)[0], recurrence, slots)
    grads: Any = graph.graph.output_node().args[0][len(results) :]  # type: ignore[index]
    inputs_with_grad = tuple(i for i, grad in enumerate(grads) if grad is not None)
    reaches = tuple(
        frozenset(output for output, leaves in zip(tangents, reached, strict=True) if id(fakes[i]) in leaves)
        for i in inputs_with_grad
    )
    examples = tuple(value.detach() for value in results)
    sizes = (len(results), tangents, inputs_with_grad, len(fakes))
    return Traced(steps, graph, mode, *sizes, reaches, examples, carried, _facts(graph.graph, carried))


def _facts(graph: fx.Graph, carries: int) -> tuple[Fact, ...]:
    results: Any = graph.output_node().args[0]
    return infer_carries(graph, graph.find_nodes(op="placeholder")[:carries], results[:carries])


def _mark(primals: list[fx.Node], recurrence: Recurrence, slots: Slots) -> None:
    """Say what inputs are: number i of the carry, read at each step, or a constant of the loop, by its name."""
    for place in slots.carries:
        primals[place].meta["carry"] = place
    for node in primals[slots.carries.stop : slots.constants.start]:
        node.meta["per_step"] = True
    for place, name in zip(slots.constants, constant_names(recurrence), strict=True):
        primals[place].meta["constant"] = name


def constant_names(recurrence: Recurrence) -> list[str]:
    """The names of the constants of the loop, in their order."""
    return [node.name for node in recurrence.inputs[-1]]


def _example_inputs(recurrence: Recurrence, examples: Sequence[torch.Tensor], steps: int) -> list[Any]:
    """Per-step inputs of ``steps`` steps, as a segment takes them; examples may have fewer."""
    if not recurrence.any_length:
        return step_inputs(recurrence, examples, numbers_of(recurrence), 0, steps)
    xs = [Numbers((x.values or (0.0,))[:1] * steps) if isinstance(x, Numbers) else x for x in recurrence.xs]
    numbers, inputs = numbers_of(replace(recurrence, xs=tuple(xs))), list[Any]()
    for place, x in enumerate(xs):
        if isinstance(x, Slices):
            inputs.append(_example_rows(examples[x.operand], x.dim, steps))
        else:
            inputs += [examples[i] for i in x.operands[:steps]] if isinstance(x, Items) else [numbers[place]]
    return inputs


def _example_rows(example: torch.Tensor, dim: int, steps: int) -> torch.Tensor:
    """Rows of an example, without gaps: of it alone, as steps may read it whole, too, or along another dimension."""
    sizes = [*example.shape]
    sizes[dim] = steps
    with example.fake_mode:  # type: ignore[attr-defined]
        rows = torch.empty_strided(sizes, dense(sizes, example.stride()), dtype=example.dtype, device=example.device)
    return rows.requires_grad_(example.requires_grad)


def _leaves_of(result: torch.Tensor) -> set[int]:
    """Identities of the leaves that autograd reaches from a result, as it walks: whatever gradients it will find."""
    found: set[int] = set()
    todo: list[Any] = [torch.autograd.graph.get_gradient_edge(result).node]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        fresh = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= fresh
        todo += fresh
    return found


def _settle_gradients(recurrence: Recurrence, fakes: list[torch.Tensor], slots: Slots) -> None:
    """A carry needs a gradient if its initial value does or the step makes one that does: a fixpoint."""
    carries, grown = fakes[: len(recurrence.carries)], torch.is_grad_enabled()
    able = [carry for carry in carries if carry.is_floating_point() or carry.is_complex()]
    while grown and not all(carry.requires_grad for carry in able):
        results = recurrence.step(*carries, *_at(slots, fakes, 0))
        grown = False
        for carry, result in zip(carries, results[: len(carries)], strict=True):
            if result.requires_grad and not carry.requires_grad:
                carry.requires_grad_(True)
                grown = True


def linear_carries(recurrence: Recurrence) -> Sequence[Core]:
    """The carries that enter a step linearly, as matrices, of which segments do several steps together."""
    carried = len(recurrence.carries)
    numbers = candidates(recurrence.step.graph, recurrence.examples[:carried])
    if not numbers or recurrence.random or recurrence.autocast:
        return ()
    mode = trace_mode()
    with outside_dynamo(mode), recurrence.modes():
        examples = step_examples(recurrence, mode)
        with mode:
            return cores(recurrence.step, examples, numbers)


def _segment_function(
    recurrence: Recurrence, slots: Slots, linear: Sequence[Core]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    carried = len(recurrence.carries)

    def segment(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reads = [_at(slots, args, t) for t in range(slots.steps)]
        if linear:
            carries, ys = run_steps(recurrence.step, linear, args[:carried], reads)
        else:
            carries, ys = _one_by_one(recurrence, args[:carried], reads)
        return (*carries, *(torch.stack(rows) for rows in zip(*ys, strict=True)))

    return segment


def _one_by_one(recurrence: Recurrence, carries: Sequence[Any], reads: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
    """The last carries, and what each step gives besides."""
    ys = []
    for read in reads:
        results = recurrence.step(*carries, *read)
        carries = results[: len(carries)]
        ys.append(results[len(carries) :])
    return list(carries), ys


def _shared(carries: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> frozenset[int]:
    """Carries, by number, that are not contiguous, or that share memory with an input or with another carry. A tape
    that holds one of the others has what is handed on, and no copy of it."""
    found, taken = set[int](), set(map(storage_id, inputs))
    for number, carry in enumerate(carries):
        whole = carry.untyped_storage().nbytes() == carry.nbytes and not (carry.is_conj() or carry.is_neg())
        as_usual = carry.stride() == torch.empty(carry.shape, device="meta").stride()
        if not (whole and as_usual) or storage_id(carry) in taken:
            found.add(number)
        taken.add(storage_id(carry))
    return frozenset(found)


def _own(results: Sequence[torch.Tensor], shared: frozenset[int]) -> tuple[torch.Tensor, ...]:
    """Results of which those ``shared`` are contiguous memory of their own."""
    each = enumerate(results)
    return tuple(one.clone(memory_format=torch.contiguous_format) if n in shared else one for n, one in each)


def _run_with_own(run: Callable[..., Any], shared: frozenset[int], *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _own(run(*args), shared)
