"""A trace of a long program summed up, so that what is drawn or written of it is bounded and no peak is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from reroll.program.timeline import Event, Stay, Timeline


def coarser(trace: Timeline, most: int) -> Timeline:
    """The trace with at most ``most`` columns, ``most`` stays in each tier, and ``most`` short events of each kind.

    Columns become bins of equal time: each tier's bytes are its most in the bin, the name is that of the instruction at
    the local one. Events shorter than a bin are summed up. Seconds, turn, depth and peaks stay exact.
    """
    width = trace.seconds / most or 1.0
    names, times, memory = trace.names, trace.times, trace.memory
    if len(times) > most:
        names, times, memory = _binned(trace, most, width)
    return replace(
        trace,
        names=names,
        times=times,
        memory=memory,
        events=trace.events if len(trace.events) <= most else summed(trace.events, width),
        stays=tuple(stay for tier in memory for stay in _joined(trace, tier, most)),
    )


def _binned(
    trace: Timeline, most: int, width: float
) -> tuple[tuple[str, ...], tuple[float, ...], dict[str, tuple[int, ...]]]:
    """Names, times and bytes of ``most`` bins of ``width`` seconds."""
    names = [""] * most
    memory = {tier: [0] * most for tier in trace.memory}
    edges = pairwise([*trace.times, trace.seconds])
    for index, (begin, end) in enumerate(edges):
        first = min(int(begin / width), most - 1)
        # An instruction that ends where a bin begins is not in that bin.
        last = max(min(-int(-end // width) - 1, most - 1), first)
        for bin_ in range(first, last + 1):
            if not names[bin_] or trace.memory["local"][index] > memory["local"][bin_]:
                names[bin_] = trace.names[index]
            for tier, nbytes in trace.memory.items():
                memory[tier][bin_] = max(memory[tier][bin_], nbytes[index])
    times = tuple(index * width for index in range(most))
    return tuple(names), times, {tier: tuple(nbytes) for tier, nbytes in memory.items()}


def summed(events: Iterable[Event], width: float, *, apart: bool = True) -> tuple[Event, ...]:
    """The events with those shorter than ``width`` seconds summed up: one for all that begin in the same ``width``.

    Kinds stay ``apart``, or all of a track become one event, so that no two of a track overlap.
    """
    groups: dict[Hashable, list[Event]] = defaultdict(list)
    for number, event in enumerate(events):
        alone = event.end - event.begin >= width
        groups[number if alone else (int(event.begin / width), event.track, event.kind if apart else "")].append(event)
    return tuple(sorted((_sum(group) for group in groups.values()), key=lambda event: event.begin))


def _sum(group: Sequence[Event]) -> Event:
    if len(group) == 1:
        return group[0]
    kinds = list(dict.fromkeys(event.kind for event in group))
    return Event(
        track=group[0].track,
        kind=kinds[0] if len(kinds) == 1 else " and ".join([", ".join(kinds[:-1]), kinds[-1]]),
        name=f"{group[0].name} to {group[-1].name}",
        start=min(event.start for event in group),
        stop=max(event.stop for event in group),
        begin=group[0].begin,
        end=max(event.end for event in group),
        again=max(event.again for event in group),
        nbytes=sum(event.nbytes for event in group),
        count=sum(event.count for event in group),
    )


def _joined(trace: Timeline, tier: str, most: int) -> list[Stay]:
    """At most ``most`` stays of a tier: carries of neighbouring steps are joined, short gaps between them bridged."""
    found = [stay for stay in trace.stays if stay.tier == tier]
    rows, gap = max(most // 4, 1), 0.0
    while len(found) > most:
        found = _bridged(found, gap, height=max(trace.steps / rows, 1.0))
        rows, gap = max(rows // 2, 1), 2 * gap or trace.seconds / most
    return found


def _bridged(stays: Iterable[Stay], gap: float, height: float) -> list[Stay]:
    """Stays in rows of ``height`` steps, as one where they lie at most ``gap`` seconds apart."""
    last: dict[int, Stay] = {}
    found: list[Stay] = []
    for stay in sorted(stays, key=lambda stay: stay.begin):
        row = int(stay.step / height)
        before = last.get(row)
        if before is not None and stay.begin <= before.end + gap:
            last[row] = replace(before, end=max(before.end, stay.end))
            continue
        if before is not None:
            found.append(before)
        last[row] = stay
    return [*found, *last.values()]
