"""What each rewrite of a loop holds and takes: its graphs with it beside those without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from reroll.backends.construct.kernels import PACKING, Kernels, passes_of
from reroll.backends.construct.plan import Built
from reroll.backends.inductor.lower import halves_of
from reroll.graph.memory import graph_peak
from reroll.graph.work import work
from reroll.passes.segment.event_products import too_small
from reroll.program.registry import find, run_on_half
from reroll.report.rewrites import Rewrite


def rewrites_of(built: Built) -> tuple[Rewrite, ...]:
    """Those of the loop's segments, in the order in which they are made, then what the planner chose."""
    return (*_of_halves(built), *_packed(built.kernels), *_replayed(built))


def _of_halves(built: Built) -> Iterator[Rewrite]:
    """Those that passes made of the two halves, one behind another."""
    kernels, options = built.kernels, built.options
    policy = options.policy(built.executable.recurrence.where)
    halves = halves_of(kernels.traced, options.lowering, options.codec, policy, replay=kernels.replay)
    for name in passes_of(options):
        if find(name).on != "half" or name == PACKING:
            continue
        before = _measured(halves)
        small = _small(name, halves, kernels)
        halves = [run_on_half((name,), half, kernels.context) for half in halves]
        after = _measured(halves)
        if before != after or small:
            yield replace(_compared(name, before, after), small=small)


def _small(name: str, halves: Sequence[fx.GraphModule], kernels: Kernels) -> tuple[tuple[int, int, int], ...]:
    """The sizes of products that a pass leaves because they are too small."""
    if name != "event-products":
        return ()
    return tuple(dict.fromkeys(sizes for half in halves for sizes in too_small(half, kernels.context)))


class _Halves(NamedTuple):
    """Bytes that a half holds at most; operations of both, how many of them are reroll's own, and their work."""

    held: int
    calls: int
    own: int
    work: float


def _measured(halves: Sequence[fx.GraphModule]) -> _Halves:
    calls = [node for half in halves for node in half.graph.nodes if node.op == "call_function"]
    own = sum(str(node.target).startswith("reroll") for node in calls)
    held = max(graph_peak(half.graph, []) for half in halves)
    return _Halves(held, len(calls), own, sum(work(half.graph) for half in halves))


def _compared(name: str, before: _Halves, after: _Halves) -> Rewrite:
    times = after.work / max(before.work, 1.0) if before.own == after.own else None
    return Rewrite(name, after.held - before.held, times, (before.calls, after.calls))


def _packed(kernels: Kernels) -> Iterator[Rewrite]:
    packed = kernels.compiled.once.packed
    if packed:
        yield Rewrite(PACKING, packed)


def _replayed(built: Built) -> Iterator[Rewrite]:
    """Replayed products: the tape of a segment with them, and without."""
    replaying, used = built.kernels.replaying, built.kernels.replay
    if replaying is not None:
        yield Rewrite("replay", replaying.replayed - replaying.kept, replaying.work, used=used, each="each tape")
