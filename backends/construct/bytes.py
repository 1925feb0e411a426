"""Bytes of compiled segments: from inductor's own plan where its wrapper can be read, else from the ATen graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from reroll.backends.codecs.codec import CODECS
from reroll.backends.construct.kernels import Kernels
from reroll.backends.inductor.half import Code
from reroll.backends.inductor.lower import Halved, Interpreted, Segment
from reroll.backends.inductor.workspaces import workspaces
from reroll.backends.inductor.wrapper_codegen.wrapper import wrapper_peak
from reroll.backends.tiers.device import Device
from reroll.backends.tiers.tier import STAGING
from reroll.graph.memory import Owned, graph_peak, origin, storage_nbytes
from reroll.operations import of
from reroll.program.memory import Needs, SegmentBytes
from reroll.program.tally import Sizes
from reroll.recurrence import Items, Recurrence, Slots
from reroll.schedules.machine import pieces
from reroll.segment.factors import handed_number
from reroll.segment.trace import lies_packed


def needs_of(kernels: Kernels, recurrence: Recurrence, *, device: Device | None) -> Needs:
    """Bytes of carries and tapes as they are kept, and of what the segments and, if a ``device`` records them, their
    recordings need besides."""
    traced, segments, once = kernels.traced, kernels.compiled.segments, kernels.compiled.once.nbytes
    values, length = traced.results[: traced.carries], traced.steps
    plain = sum(value.numel() * value.element_size() for value in values)
    held = once + turned_gradients(segments[length], recurrence)
    if device is not None:
        held += once + recordings(segments.values(), recurrence)
        held += workspace_bytes(segments[length], device)
    recorded, thinnable = device is not None, {k: each for k, each in segments.items() if each.thin}
    joined = frozenset[int]() if recorded else _joined(segments.values(), traced.carries, thin=False)
    thinly = frozenset[int]() if recorded else _joined(thinnable.values(), traced.carries, thin=True)
    given = {k: _Inputs.of(each, recurrence) for k, each in segments.items()}
    footprints = {k: footprint(each, given[k], held, joined) for k, each in segments.items()}
    thin = _Thin({k: partial(thin_footprint, each, given[k], held, thinly) for k, each in thinnable.items()})

    def packed(codec: tuple[str, ...]) -> int:
        if not codec:
            return plain
        return sum(
            CODECS.find(name).nbytes(value.numel(), value.dtype) for value, name in zip(values, codec, strict=True)
        )

    def taped(start: int, stop: int) -> int:
        return sum(footprints[k].saved * count for k, count in pieces(stop - start, segments))

    def thinly_taped(start: int, stop: int) -> int:
        return sum(thin[k].saved * count for k, count in pieces(stop - start, segments))

    return Needs(
        segments=footprints,
        sizes=Sizes(carry=plain, packed=packed, taped=taped, first=0, thin=thinly_taped),
        carry=plain,
        grads=carry_gradients(segments[length], traced.carries),
        output_grads=output_gradients(segments[length], recurrence),
        staged=STAGING,
        thin=thin,
    )


class _Thin(Mapping[int, SegmentBytes]):
    """The bytes of segments with thin tapes, by length: only where they are asked for are their backwards compiled."""

    def __init__(self, makers: Mapping[int, Callable[[], SegmentBytes]]) -> None:
        self._makers, self._made = makers, dict[int, SegmentBytes]()

    def __getitem__(self, length: int) -> SegmentBytes:
        if length not in self._made:
            self._made[length] = self._makers[length]()
        return self._made[length]

    def __iter__(self) -> Iterator[int]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """The inputs of a forward: its carry, and the operands of the loop behind it.

    Some operands are ``copies``, made for the segment: rows of sequences that do not lie as it takes them. One that is
    saved as it is is made again for the backward. The others are ``held`` by a tape that has views of them. ``alone``:
    the gradients, by number, of what stands in lists, which are not added up.
    """

    carry: Sequence[fx.Node]
    operands: Sequence[fx.Node]
    copies: Sequence[fx.Node]
    held: Sequence[fx.Node]
    alone: frozenset[int]

    @classmethod
    def of(cls, segment: Segment, recurrence: Recurrence) -> _Inputs:
        """Copies are told by how the examples of the loop lie."""
        nodes, steps = segment.forward_graph.graph.find_nodes(op="placeholder"), segment.steps
        carries, rows = len(recurrence.carries), recurrence.loose_rows(steps)
        copied = [nodes[at] for at, x in rows if not lies_packed(recurrence.examples[x.operand], x, steps)]
        again = {nodes[place] for place in segment.saved_inputs.values()}
        listed = {place for places, x in recurrence.slots(steps).xs if isinstance(x, Items) for place in places}
        alone = frozenset(number for number, place in enumerate(segment.inputs) if place in listed)
        return cls(nodes[:carries], nodes[carries:], copied, [node for node in copied if node not in again], alone)


def footprint(segment: Segment, inputs: _Inputs, once: int, joined: frozenset[int] = frozenset()) -> SegmentBytes:
    """What the runs of a segment hold; ``once`` bytes are held anyway, and carries ``joined`` by the tape before."""
    if segment.backward is None or segment.backward_graph is None:
        return SegmentBytes(0, *_forward_peaks(segment, inputs, once), 0)
    return _with_tape(segment, inputs, once, joined, segment.backward, segment.backward_graph, thin=False)


def thin_footprint(segment: Segment, inputs: _Inputs, once: int, joined: frozenset[int]) -> SegmentBytes:
    """The same of a segment whose thin tape is kept."""
    assert segment.thin is not None
    return _with_tape(segment, inputs, once, joined, segment.thin.backward, segment.thin.backward_graph, thin=True)


def _with_tape(
    segment: Segment,
    inputs: _Inputs,
    once: int,
    joined: frozenset[int],
    backward: Any,
    graph: fx.GraphModule,
    *,
    thin: bool,
) -> SegmentBytes:
    before = {inputs.carry[number] for number in joined}
    saved = _blocks(_saved(segment, {*inputs.operands, *before} - set(inputs.held), graph, thin=thin))
    again = _blocks(_saved(segment, {*inputs.operands, *before} - set(inputs.copies), graph, thin=thin))
    reverse = once + _peak(backward, graph.graph, again)
    adding = once + _adding_peak(backward, graph.graph, again, inputs.alone)
    peaks = _forward_peaks(segment, inputs, once)
    return SegmentBytes(sum(nbytes for nbytes, _ in saved), *peaks, reverse, _bytes_of(before), adding)


def _adding_peak(backward: Any, graph: fx.Graph, owned: Owned, alone: frozenset[int]) -> int:
    """The most that a backward holds from where it hands over the first gradient that is added to others: not one of
    those ``alone``, by their numbers."""
    if not (isinstance(backward, Interpreted) and backward.hands_over):
        return _peak(backward, graph, owned)
    begin = (
        node for node in backward.graph.nodes if (number := handed_number(node)) is not None and number not in alone
    )
    return graph_peak(backward.graph, owned, workspaces(backward.graph), next(begin, None))


def _joined(segments: Iterable[Segment], carries: int, *, thin: bool) -> frozenset[int]:
    """The carries that a tape holds in the same memory as the tape behind it: both save them, as they are given."""
    return frozenset(range(carries)).intersection(*(_both_saved(each, carries, thin) for each in segments))


def _both_saved(segment: Segment, carries: int, thin: bool) -> set[int]:
    results: Any = segment.forward_graph.graph.output_node().args[0]
    inputs = segment.forward_graph.graph.find_nodes(op="placeholder")
    saved = {origin(node) for node in segment.kept(list(results[segment.outputs :]), thin)}
    handed = {number: origin(results[number]) for number in range(carries)}
    return {n for n, made in handed.items() if made in saved and inputs[n] in saved and made not in inputs}


def _forward_peaks(segment: Segment, inputs: _Inputs, once: int) -> tuple[int, int]:
    """The most bytes of a forward from a carry of its own, and from one that is kept elsewhere."""
    owned = (*inputs.carry, *inputs.copies)
    return once + _forward_peak(segment, owned), once + _forward_peak(segment, inputs.copies)


def _forward_peak(segment: Segment, own: Sequence[fx.Node]) -> int:
    """Bytes of a forward that drops the last reference to its inputs ``own``. In two, what the second one reads of them
    stays until then, and so do the saved values."""
    forward = segment.forward
    if not isinstance(forward, Halved):
        return _peak(forward, segment.forward_graph.graph, _owned(own))
    parts = forward.parts
    inputs = parts.taping.graph.find_nodes(op="placeholder")
    names = {node.name for node in own}
    numbers = [number for number, node in enumerate(inputs) if node.name in names]
    held = [number for number in numbers if number in parts.inputs]
    first = _peak(forward.taping, parts.taping.graph, _owned(inputs[n] for n in numbers if n not in held))
    given = parts.rest.graph.find_nodes(op="placeholder")
    results: Any = parts.taping.graph.output_node().args[0]
    saved = {origin(node) for node in results[: parts.saved]} - set(inputs)
    between = zip(given[len(parts.inputs) :], (origin(results[number]) for number in parts.results), strict=True)
    carried = [given[parts.inputs.index(number)] for number in held]
    last = [*carried, *(node for node, made in between if made not in saved and made not in inputs)]
    return max(first + _bytes_of(carried), _bytes_of(saved) + _peak(forward.rest, parts.rest.graph, _owned(last)))


def _owned(nodes: Iterable[fx.Node]) -> Owned:
    return [(storage_nbytes(node.meta.get("val")), (node.name,)) for node in nodes]


def _blocks(saved: Iterable[tuple[fx.Node, fx.Node]]) -> Owned:
    """The memory of saved values: what shares that of one value of the forward is one block."""
    memory: dict[fx.Node, tuple[int, tuple[str, ...]]] = {}
    for made, reader in saved:
        nbytes, names = memory.get(made, (storage_nbytes(made.meta.get("val")), ()))
        memory[made] = max(nbytes, storage_nbytes(reader.meta.get("val"))), (*names, reader.name)
    return list(memory.values())


def _saved(
    segment: Segment, operands: set[fx.Node], backward: fx.GraphModule, *, thin: bool = False
) -> list[tuple[fx.Node, fx.Node]]:
    """(where a saved value was made, its placeholder in the backward) of all that is no operand. By position: inductor
    renames nodes of the forward."""
    results: Any = segment.forward_graph.graph.output_node().args[0]
    readers = backward.graph.find_nodes(op="placeholder")
    kept = segment.kept(list(results[segment.outputs :]), thin)
    pairs = ((origin(node), reader) for node, reader in zip(kept, readers, strict=False))
    return [(made, reader) for made, reader in pairs if made not in operands]


def carry_gradients(segment: Segment, carries: int) -> int:
    """Bytes of the gradients with respect to a carry."""
    return sum(storage_nbytes(segment.output_examples[index]) for index in segment.tangents if index < carries)


def output_gradients(segment: Segment, recurrence: Recurrence) -> int:
    """Bytes of the gradients with respect to the stacked outputs; where these have no row of some steps, those of all
    steps of a segment besides, as its backward is given zeros for these."""
    carries, nbytes = len(recurrence.carries), 0
    for index in segment.tangents:
        if index >= carries:
            like, kept = segment.output_examples[index], recurrence.kept_rows[index - carries]
            rows = kept.rows(recurrence.steps) + (0 if kept.whole else segment.steps)
            nbytes += storage_nbytes(like) // like.shape[0] * rows
    return nbytes


def _peak(compiled: Any, graph: fx.Graph, owned: Owned) -> int:
    working = workspaces(graph)
    if isinstance(compiled, Code) and compiled.source:  # inductor writes none where there is no operation
        peak = wrapper_peak(compiled.source, owned, compiled.itemsizes, working)
        if peak is not None:
            return peak
    return graph_peak(compiled.graph if isinstance(compiled, Interpreted) else graph, owned, working)


def turned_gradients(segment: Segment, recurrence: Recurrence) -> int:
    """Bytes of gradients of constants that lie otherwise than these: added up as they come, they are copied at last."""
    if segment.backward_graph is None:
        return 0
    results: Any = segment.backward_graph.graph.output_node().args[0]
    slots, found = recurrence.slots(segment.steps), 0
    for number, (place, result) in enumerate(zip(segment.inputs, results, strict=False)):
        if place in slots.constants:
            like, product = recurrence.examples[slots.operands[place][0]], segment.products.get(number)
            made = product.zeros(like) if product else like if result is None else result.meta["val"]
            found += like.nbytes if made.stride() != like.stride() else 0
    return found


def operand_gradients(segment: Segment, recurrence: Recurrence) -> int:
    """Bytes of the gradients that are added up over the steps, for constants and the operands of per-step inputs."""
    slots = recurrence.slots(segment.steps)
    added = [slots.operands[place] for place in segment.inputs if place not in slots.carries]
    return sum(recurrence.examples[operand].nbytes for operand in {operand for each in added for operand in each})


def recordings(segments: Iterable[Segment], recurrence: Recurrence) -> int:
    """Bytes at most that recordings of segments hold: copies of the constants, and for each segment its results and
    inputs of its own. What goes from its forward to its backward is there once. While a half is recorded, what it gave
    before is there, too."""
    made = list(segments)
    constants = sum(recurrence.examples[i].nbytes for i in recurrence.constants)
    halves = (half.graph for each in made for half in (each.forward_graph, each.backward_graph) if half is not None)
    before = max(_bytes_of(graph.output_node().all_input_nodes) for graph in halves)
    return constants + before + sum(_recorded(segment, recurrence.slots(segment.steps)) for segment in made)


def workspace_bytes(segment: Segment, device: Device) -> int:
    """Bytes in which products of recorded halves work: one thread records forwards, another of autograd's backwards."""
    halves = [half for half in (segment.forward_graph, segment.backward_graph) if half is not None]
    return device.workspace() * sum(any(map(_is_of_cublas, half.graph.nodes)) for half in halves)


def _is_of_cublas(node: fx.Node) -> bool:
    return node.op == "call_function" and of(node.target).product in ("matrices", "batches")


def _recorded(segment: Segment, slots: Slots) -> int:
    inputs = segment.forward_graph.graph.find_nodes(op="placeholder")
    own = inputs[: slots.constants.start]
    results: Any = segment.forward_graph.graph.output_node().args[0]
    nbytes = _bytes_of(own) + _bytes_of({origin(node) for node in results} - set(inputs))
    if segment.backward_graph is None:
        return nbytes
    saved = _saved(segment, set(own), segment.backward_graph)
    held = {reader for _, reader in saved}  # there already: results of the forward, or constants
    readers = segment.backward_graph.graph.find_nodes(op="placeholder")
    given = sum(map(len, segment.extra_backward))
    gradients = segment.backward_graph.graph.output_node().all_input_nodes
    return nbytes + _bytes_of(set(readers[: len(readers) - given]) - held) + _bytes_of(gradients)


def _bytes_of(nodes: Iterable[fx.Node]) -> int:
    return sum(storage_nbytes(node.meta.get("val")) for node in nodes)
