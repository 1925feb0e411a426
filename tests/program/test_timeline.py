"""A program in time: exact seconds by hand, peaks those of the verifier and the prediction, long programs bounded."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.errors import OptionError
from reroll.planning.alternative import Alternative, pareto
from reroll.program.context import Context
from reroll.program.memory import Needs, SegmentBytes, predict
from reroll.program.program import Program, reverse, store_all
from reroll.program.registry import run
from reroll.program.spelled import spelled_out
from reroll.program.tally import Sizes
from reroll.program.timeline import Event, Stay, Timeline, trace
from reroll.program.timeline_summary import coarser, summed
from reroll.program.verifier import verify
from reroll.schedules.machine import Costs, Machine, MachineTier, SegmentSeconds
from reroll.schedules.named import schedule_names
from toy import root_of

PASSES = "sparsity,save,recompute,offload,compress,prefetch"
NEEDS = Needs({1: SegmentBytes(10, 17, 15, 25), 2: SegmentBytes(19, 33, 31, 41)}, Sizes(5, 10), 5, 4, 3, 2)
SECONDS = {1: SegmentSeconds(3.0, 4.0, 8.0), 2: SegmentSeconds(5.0, 7.0, 15.0)}
DISK = Machine("by hand", {"disk": MachineTier("disk", write=1.0, read=2.0, latency=0.5)})
BLOCKING, OVERLAPPED = Costs(SECONDS, DISK), Costs(SECONDS, DISK, overlapped=True)


def program(schedule: str, steps: int, chunk: int, slots: int = 1, segment: int = 1, passes: str = PASSES) -> Program:
    slots += 3 * (schedule == "revolve")  # with fewer it refuses to run steps that often
    return run(passes, store_all(steps, segment), Context(root_of(schedule, steps, segment, chunk, slots)))


def spans(found: Timeline) -> list[tuple[str, str, float, float]]:
    return [(event.track, event.name, event.begin, event.end) for event in found.events]


def test_blocking_transfers_stop_compute() -> None:
    found = trace(program("remote", 2, 1, passes="sparsity,save,recompute,offload"), NEEDS, BLOCKING)
    assert spans(found) == [
        ("write disk", "offload_at0", 0, 5.5),
        ("compute", "advance_0to1", 5.5, 8.5),
        ("write disk", "offload_at1", 8.5, 14),
        ("compute", "advance_1to2", 14, 17),
        ("read disk", "reload_at1", 17, 20),
        ("compute", "tape_1to2", 20, 24),
        ("compute", "backward_1to2", 24, 32),
        ("read disk", "reload_at0", 32, 35),
        ("compute", "tape_0to1", 35, 39),
        ("compute", "backward_0to1", 39, 47),
    ]
    assert (found.seconds, found.turn, found.depth) == (47, 17, 1)
    assert Stay("disk", 1, 8.5, 20) in found.stays
    assert [event.again for event in found.events if event.kind == "tape"] == [1, 1]


def test_overlapped_transfers_have_lanes_of_their_own() -> None:
    found = trace(program("remote", 2, 1), NEEDS, OVERLAPPED)
    assert spans(found) == [
        ("write disk", "offload_at0", 0, 5.5),
        ("compute", "advance_0to1", 0, 3),
        ("write disk", "offload_at1", 5.5, 11),
        ("compute", "advance_1to2", 3, 6),
        ("read disk", "reload_at1", 11, 14),
        ("read disk", "reload_at0", 14, 17),  # prefetched, after the read before it
        ("compute", "tape_1to2", 14, 18),
        ("compute", "backward_1to2", 18, 26),
        ("compute", "tape_0to1", 26, 30),
        ("compute", "backward_0to1", 30, 38),
    ]
    assert (found.seconds, found.turn) == (38, 6)


def test_segments_of_several_lengths_add_up() -> None:
    found = trace(program("standard", 5, 3, segment=2), NEEDS, BLOCKING)
    assert spans(found)[0] == ("compute", "advance_0to4", 0, 10)
    assert spans(found)[1] == ("compute", "advance_4to5", 10, 13)
    assert found.seconds == 13 + (4 + 8) + 2 * (7 + 15)


def test_without_costs_steps_are_the_unit() -> None:
    found = trace(program("double", 8, 4, 2), NEEDS)
    assert found.nominal
    assert found.seconds == 8 + 8 + 8 + 2 * 8
    assert (found.turn, found.depth) == (8, 2)


def test_a_tier_without_costs_is_refused() -> None:
    with pytest.raises(OptionError, match="keeps carries in 'disk', but machine 'bare' has no such tier"):
        trace(program("remote", 4, 2), NEEDS, Costs(SECONDS, Machine("bare")))


def test_carries_of_a_block_stay_each_until_it_is_read() -> None:
    found = trace(program("hierarchical", 4, 4, 2, passes="sparsity,save,recompute,offload"), NEEDS)
    local = [stay for stay in found.stays if stay.tier == "local" and stay.begin >= found.turn]
    assert sorted((stay.step, stay.end) for stay in local) == [(0, 12.0), (2, 6.0)]
    assert {stay.step for stay in found.stays if stay.tier == "disk"} == {0, 2}


@given(
    schedule=st.sampled_from(sorted({*schedule_names()})),
    steps=st.integers(1, 30),
    segment=st.integers(1, 2),
    chunk=st.integers(1, 12),
    slots=st.integers(1, 6),
    staged=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_bytes_are_the_predicted_ones_and_seconds_add_up(
    schedule: str, steps: int, segment: int, chunk: int, slots: int, staged: int
) -> None:
    made, needs = program(schedule, steps, chunk, slots, segment), replace(NEEDS, staged=staged)
    tally = verify(made, sizes=needs.sizes)
    prediction = predict(tally, needs)
    blocking, overlapped = trace(made, needs, BLOCKING), trace(made, needs, OVERLAPPED)
    assert collapsed(made, blocking.memory["local"]) == prediction.timeline
    assert blocking.peak("local") == prediction.peak
    assert made.parts or blocking.at_peak() == prediction.most.node
    assert blocking.peak("disk") == tally.tier_peaks.get("disk", 0)
    assert blocking.memory == overlapped.memory
    assert min(map(min, blocking.memory.values())) >= 0
    assert "disk" not in blocking.memory or blocking.memory["disk"][-1] == 0
    assert blocking.seconds == pytest.approx(sum(event.end - event.begin for event in blocking.events))
    assert overlapped.seconds <= blocking.seconds
    assert sum(event.stop - event.start for event in blocking.events if event.kind != "backward") == tally.forward_steps
    for found in (blocking, overlapped):
        assert found.times == tuple(sorted(found.times))
        in_order(found)
        bounded(found)


def collapsed(made: Program, nbytes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Bytes by the nodes of the program, the most of each part that one plays."""
    counts: dict[Any, int] = {}
    for name, part in made.parts.items():
        counts[name] = (
            sum(counts.get(node.args[2], 1) if node.target is reverse else 1 for node in part.graph.nodes) - 3
        )
    rest, found = iter(nbytes), []
    for node in made.graph.nodes:
        count = counts[node.args[2]] if node.target is reverse else 1
        found.append((node.name, max(islice(rest, count))))
    return tuple(found)


def in_order(found: Timeline) -> None:
    """On no track do two events overlap, and no segment runs before what it reads was read."""
    for track in found.tracks():
        events = [event for event in found.events if event.track == track]
        assert all(a.end <= b.begin for a, b in pairwise(events))
    arrived = {event.name: event.end for event in found.events if event.kind == "reload"}
    runs = {event.start: event.begin for event in found.events if event.kind == "tape"}
    assert all(runs.get(int(name.partition("_at")[2]), end) >= end for name, end in arrived.items())


def bounded(found: Timeline) -> None:
    """Summed up, a trace keeps its figures."""
    small = coarser(found, 8)
    assert len(small.times) <= 8
    assert all(sum(stay.tier == tier for stay in small.stays) <= 8 for tier in small.memory)
    assert (small.seconds, small.turn, small.depth) == (found.seconds, found.turn, found.depth)
    assert small.instructions == found.instructions == len(found.names)
    assert {tier: small.peak(tier) for tier in small.memory} == {tier: found.peak(tier) for tier in found.memory}
    assert small.at_peak() == found.at_peak()
    assert sum(event.count for event in small.events) == len(found.events)
    groups = {(event.track, event.kind, int(8 * event.begin / found.seconds)) for event in small.events}
    assert len(small.events) <= len(groups) + 8


def test_a_short_program_is_left_exact() -> None:
    found = trace(program("standard", 12, 4), NEEDS, BLOCKING)
    same = coarser(found, 100)
    assert (same.times, same.memory, same.events, same.stays) == (found.times, found.memory, found.events, found.stays)


def test_summed_events_of_a_track_do_not_overlap() -> None:
    found = trace(program("double", 200, 20, 4), NEEDS, OVERLAPPED)
    events = summed(found.events, found.seconds / 50, apart=False)
    assert len(events) <= 50 * len(found.tracks())
    for track in found.tracks():
        each = [event for event in events if event.track == track]
        assert all(a.end <= b.begin for a, b in pairwise(each))
    assert any(event.kind == "tape and backward" for event in events)
    assert sum(event.nbytes for event in events) == sum(event.nbytes for event in found.events)


def test_a_summed_event_covers_its_parts() -> None:
    parts = [Event("compute", "tape", f"tape_{at}", at, at + 1, at, at + 1.0, again=at) for at in range(3)]
    (whole,) = summed(parts, 10.0)
    assert whole == Event("compute", "tape", "tape_0 to tape_2", 0, 3, 0, 3.0, again=2, count=3)


def test_a_program_is_spelled_out_in_order() -> None:
    made = program("hierarchical", 4, 4, 2)
    played = list(spelled_out(made))
    assert [each.name for each in played] == [node.name for node in made.graph.nodes]
    block = next(each for each in played if each.kind == "offload")
    assert [played[number].kind for number in block.reads] == ["save", "save"]
    assert (block.tier, played[-1].kind, played[0].kind) == ("disk", "output", "carry")


def test_the_pareto_curve_holds_what_nothing_beats() -> None:
    plans = [Alternative(name, peak, seconds, 0) for name, peak, seconds in [("a", 9, 1), ("b", 5, 2), ("c", 6, 3)]]
    assert [each.name for each in pareto(plans)] == ["b", "a"]
