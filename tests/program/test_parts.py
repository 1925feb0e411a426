"""Parts of a program: shared where intervals end alike, checked after every pass, and never edited in secret."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from reroll.errors import PassError
from reroll.passes import DEFAULT_PASSES
from reroll.passes.program.recompute import recompute
from reroll.program.context import Context
from reroll.program.program import Program, reverse, save, store_all
from reroll.program.registry import find, register_pass, run
from reroll.program.spelled import RUN_KINDS, Played, spelled_out
from reroll.program.verifier import Sizes, verify
from reroll.schedules.interval import Interval
from reroll.schedules.named import tree
from reroll.schedules.problem import Problem
from toy import play, reference

LONG = Problem(100_000, 1, 1, 64, memory=1000)


def planned(root: Interval) -> Program:
    return run(DEFAULT_PASSES, store_all(root.steps, 1), Context(root))


def depth(program: Program) -> int:
    """How deep parts play parts."""

    @cache
    def of(name: str) -> int:
        nodes = program.parts[name].graph.find_nodes(op="call_function", target=reverse)
        return 1 + max((of(node.args[2]) for node in nodes), default=0)

    return max(map(of, program.parts))


def unnamed(program: Program) -> list[Played]:
    """What is played, without names; a run that reads a saved carry is said to read what was saved."""
    played = list(spelled_out(program))

    def source(number: int) -> int:
        return source(played[number].reads[0]) if played[number].kind == "save" else number

    return [
        each._replace(name="", reads=tuple(map(source, each.reads)) if each.kind in RUN_KINDS else each.reads)
        for each in played
    ]


@st.composite
def wide_trees(draw: st.DrawFn) -> Interval:
    """Intervals of many children that end alike, local and remote ones, taped and not."""
    leaves = st.sampled_from([Interval(1), Interval(2), Interval(1, taped=True), Interval(1, "disk")])
    end = draw(st.lists(leaves, min_size=8, max_size=30))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        children = (*draw(st.lists(leaves, max_size=10)), *end)
        tier = draw(st.sampled_from(["local", "disk"]))
        made.append(Interval(sum(child.steps for child in children), tier, children))
    return Interval(sum(child.steps for child in made), children=tuple(made))


@given(root=wide_trees())
@settings(max_examples=60, deadline=None)
def test_shared_ends_play_the_same_instructions_and_hold_the_same(root: Interval) -> None:
    shared = planned(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[recompute.__module__], "_is_end", lambda length: False)
        plain = planned(root)
    assert unnamed(shared) == unnamed(plain)
    assert play(shared) == reference(root.steps)
    sizes = Sizes(carry=3, tape_step=7)
    first, second = verify(shared, sizes=sizes), verify(plain, sizes=sizes)
    costs = ("local_peak", "tier_peaks", "reforward_steps", "carries_written", "carries_read")
    assert [getattr(first, cost) for cost in costs] == [getattr(second, cost) for cost in costs]


def test_rounded_carries_are_not_run_on_from() -> None:
    root = tree("double", Problem(64, chunk=64, slots=64))
    programs = {
        codec: run(DEFAULT_PASSES, store_all(64, 1), Context(root, codec=codec)) for codec in ("auto", "bfloat16")
    }
    assert {codec: len(program.parts) for codec, program in programs.items()} == {"auto": 8, "bfloat16": 1}


def test_what_repeats_is_written_down_once() -> None:
    program = planned(tree("revolve", LONG))
    tally = verify(program, sizes=Sizes(carry=1, tape_step=64))
    assert (tally.local_peak, tally.reforward_steps) == (1000, 192_678)
    assert sum(len(graph.nodes) for graph in program.graphs) < 20_000
    assert depth(program) < 50


SMALL = tree("double", Problem(64, chunk=32, slots=16, tier="disk"))


def test_a_copy_has_parts_of_its_own() -> None:
    program = planned(SMALL)
    before, copied = str(program), program.copy()
    for graph in copied.graphs:
        graph.erase_node(graph.output_node())
    assert str(program) == before


@pytest.mark.parametrize("name", [name for name in DEFAULT_PASSES[-6:] if name != "recompute"])
def test_passes_that_edit_no_part_share_them(name: str) -> None:
    program = planned(SMALL)
    before = str(program)
    result = find(name).make()(program, Context(SMALL))
    assert str(program) == before
    assert all(result.parts[name] is part for name, part in program.parts.items())


def _erase(program: Program) -> Program:
    """Break the last part of a copy."""
    return _erase_in_place(program.copy())


def _erase_in_place(program: Program) -> Program:
    graph = list(program.parts.values())[-1].graph
    kept = next(node for node in graph.nodes if node.target is save)
    kept.replace_all_uses_with(kept.args[0])
    graph.erase_node(kept)
    return program


def _renamed(program: Program) -> Program:
    parts = {name: replace(part, steps=part.steps + 1) for name, part in program.parts.items()}
    return replace(program, parts=parts)


def _emptied(program: Program) -> Program:
    name = list(program.parts)[-1]
    return replace(program, parts={**program.parts, name: replace(program.parts[name], graph=fx.Graph())})


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize("wrong", [_erase, _erase_in_place, _renamed, _emptied])
def test_an_illegal_part_is_refused_with_the_pass_that_made_it(wrong: Callable[[Program], Program]) -> None:
    register_pass("wrong")(lambda program, _context: wrong(program))
    with pytest.raises(PassError, match=r"Pass 'wrong' returned an illegal program.* It is in part 'part"):
        run((*DEFAULT_PASSES, "wrong"), store_all(64, 1), Context(SMALL))
