"""Passes map legal programs to legal ones with the same results, in any order; the registry says what went wrong."""

from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from reroll.errors import PassError
from reroll.passes import DEFAULT_PASSES
from reroll.program.context import Context
from reroll.program.program import Program, offload, recompute, reload, save, store_all
from reroll.program.registry import PASSES, find, pass_names, register_pass, run, run_on_step
from reroll.program.verifier import Sizes, verify
from reroll.schedules.interval import Interval
from reroll.schedules.named import schedule_names
from toy import DECIDE, built, play, reference, root_of

EVERY_PASS = tuple(name for name in (*DEFAULT_PASSES, "trim") if find(name).on == "program")


@dataclass(frozen=True)
class Proved:
    codec: str


def facts(*codecs: str) -> Any:
    return tuple(Proved(codec) for codec in codecs)


@given(
    name=st.sampled_from(sorted({*schedule_names()} - {"revolve", "hrevolve"})),
    steps=st.integers(1, 14),
    segment=st.integers(1, 4),
    chunk=st.integers(1, 16),
    slots=st.integers(1, 16),
    tier=st.sampled_from(["local", "host"]),
)
@settings(max_examples=250, deadline=None)
def test_every_pass_keeps_every_result(name: str, steps: int, segment: int, chunk: int, slots: int, tier: str) -> None:
    context = Context(root_of(name, steps, segment, chunk, slots, tier))
    program, expected = store_all(steps, segment), reference(steps)
    for each in EVERY_PASS:
        program = run((each,), program, context)
        assert play(program) == expected
        assert [t for t, _ in play(program).inputs] == list(reversed(range(steps)))


@st.composite
def trees(draw: st.DrawFn, steps: int | None = None, depth: int = 3) -> Interval:
    """Any tree of intervals, with any tiers and blocks, equal ones among them."""
    steps = draw(st.integers(1, 10)) if steps is None else steps
    cuts = draw(st.sets(st.integers(0, steps), max_size=4)) if depth and draw(st.booleans()) else None
    tier = draw(st.sampled_from(["local", "local", "host", "disk"]))
    block = draw(st.sampled_from([None, 0, 1]))
    if cuts is None:
        taped = depth < 3 and tier == "local" and draw(st.booleans())
        return Interval(steps, tier, block=block, taped=taped)
    lengths = [high - low for low, high in pairwise(sorted({0, steps} | cuts))]
    children = tuple(draw(trees(length, depth - 1)) for length in lengths)
    if len(set(lengths)) == 1 and draw(st.booleans()):
        children = children[:1] * len(children)
    return Interval(steps, tier, children, block)


@given(root=trees(), order=st.lists(st.sampled_from(EVERY_PASS), max_size=10))
@settings(max_examples=400, deadline=None)
def test_any_tree_in_any_order_of_passes_keeps_every_result(root: Interval, order: list[str]) -> None:
    program = run(order, store_all(root.steps, 1), Context(root))
    assert play(program) == reference(root.steps)


@given(root=trees())
@settings(max_examples=150, deadline=None)
def test_any_tree_under_the_default_passes_keeps_every_result(root: Interval) -> None:
    program = run(DEFAULT_PASSES, store_all(root.steps, 1), Context(root))
    assert play(program) == reference(root.steps)
    assert play(run("trim", program, Context(root))) == reference(root.steps)


def test_passes_leave_the_given_program_as_it_is() -> None:
    context = Context(root_of("double", 16, 1, 4, 2, "disk"), facts=facts("bits"))
    program = store_all(16, 1)
    for name in EVERY_PASS:
        before = str(program)
        result = find(name).make()(program, context)
        assert str(program) == before
        program = result


def test_a_remote_first_child_is_read_again_and_a_local_one_holds() -> None:
    def reads(tier: str) -> int:
        halves = (Interval(2, tier), Interval(2))
        root = Interval(4, children=(Interval(4, "disk", halves),))
        return verify(run(DECIDE, store_all(4, 1), Context(root))).remote_reads

    assert (reads("local"), reads("disk")) == (1, 2)


@pytest.mark.parametrize("name", ["remote", "hierarchical", "double"])
@pytest.mark.parametrize(("steps", "chunk", "slots"), [(64, 16, 4), (37, 10, 3), (9, 12, 2)])
def test_prefetch_holds_at_most_one_block_more(name: str, steps: int, chunk: int, slots: int) -> None:
    program = built(name, steps, chunk, slots)
    context = Context(root_of(name, steps, 1, chunk, slots, "disk"))
    before, after = verify(program), verify(run("prefetch", program, context))
    assert after.local_peak <= before.local_peak + (slots if name == "hierarchical" else 1)
    costs = ("remote_peak", "reforward_steps", "remote_reads", "remote_writes", "carries_read", "carries_written")
    assert [getattr(before, cost) for cost in costs] == [getattr(after, cost) for cost in costs]


def test_prefetch_reads_one_chunk_ahead() -> None:
    names = [node.name for node in built("remote", 9, 3, 1, passes=DEFAULT_PASSES).graph.nodes]
    half = names[names.index("turn") + 1 : names.index("carry_at3")]
    assert half == ["reload_at6", "carry_at6", "reload_at3", "tape_6to9", "backward_6to9"]


def test_compress_names_the_codec_of_the_facts() -> None:
    root = root_of("double", 16, 1, 4, 2, "disk")
    kept = Context(root, facts=facts("bits", "raw"))
    program = run(DEFAULT_PASSES, store_all(16, 1), kept)
    nodes = [node for graph in program.graphs for node in graph.nodes if node.target in (save, offload)]
    assert nodes
    assert all(node.kwargs["codec"] == ("bits", "raw") for node in nodes)
    packed = verify(program, sizes=Sizes(carry=64, tape_step=10, packed=lambda codec: 2 if "bits" in codec else 64))
    assert packed.remote_peak == 4 * 2
    plain = run(DEFAULT_PASSES, store_all(16, 1), replace(kept, codec="none"))
    assert not any(node.kwargs for graph in plain.graphs for node in graph.nodes)


def test_trim_drops_what_nobody_reads() -> None:
    program = built("double", 9, 3, 3, passes=(*DECIDE.split(","), "trim"))
    assert all(node.users for graph in program.graphs for node in graph.nodes if node.target is recompute)
    assert verify(program).reforward_steps == 18 - 3
    assert verify(built("double_merged", 9, 3, 3, passes=DECIDE + ",trim")).local_peak <= 4


def test_a_tier_that_there_is_not_is_refused() -> None:
    context = Context(root_of("remote", 4, 1, 2, 1, "tape-drive"))
    with pytest.raises(PassError, match=r"Pass 'offload' raised OptionError.*'tape-drive'"):
        run(DECIDE, store_all(4, 1), context)


CONTEXT = Context(root_of("remote", 4, 1, 2, 1, "disk"))


@pytest.mark.usefixtures("fresh_registry")
def test_a_pass_of_ones_own() -> None:
    """Read every block right after the turn."""

    @register_pass("read-early")
    @dataclass(frozen=True)
    class ReadEarly:
        only_disk: bool = True

        def __call__(self, program: Program, context: Context) -> Program:
            program = program.copy()
            turned = next(node for node in program.graph.nodes if node.name == "turn")
            for node in list(program.graph.nodes):
                if node.target is reload and self.only_disk:
                    turned.append(node)
            return program

    program = run((*DEFAULT_PASSES, "read-early"), store_all(4, 1), CONTEXT)
    assert play(program) == reference(4)
    assert verify(program).local_peak == 2 + 2


@pytest.mark.usefixtures("fresh_registry")
def test_a_pass_on_the_step_graph() -> None:
    @register_pass("halve", on="step")
    def halve(step: fx.GraphModule, _context: Context) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.mul, (x, 0.5)))
        return fx.GraphModule(step, graph)

    step = fx.symbolic_trace(torch.nn.Identity())
    assert run_on_step("save, halve", step, CONTEXT)(torch.tensor(4.0)) == 2
    program = store_all(4, 1)
    assert run("halve", program, CONTEXT) is program


@pytest.mark.usefixtures("fresh_registry")
def test_the_code_of_a_step_is_that_of_its_graph_though_a_pass_left_the_old_one() -> None:
    @register_pass("negate", on="step")
    def negate(step: fx.GraphModule, _context: Context) -> fx.GraphModule:
        (result,) = step.graph.output_node().args
        with step.graph.inserting_before(step.graph.output_node()):
            step.graph.output_node().args = (step.graph.call_function(torch.neg, (result,)),)
        return step

    assert run_on_step("negate", fx.symbolic_trace(torch.nn.Identity()), CONTEXT)(torch.tensor(4.0)) == -4


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda program, context: None, "Pass 'wrong' must return a Program, but it returned a NoneType"),
        (lambda program, context: 1 / 0, "Pass 'wrong' raised ZeroDivisionError: division by zero"),
        (lambda program, context: replace(program, steps=3), "Pass 'wrong' changed the steps"),
        (
            lambda program, context: replace(program, graph=fx.Graph()),
            "Pass 'wrong' returned an illegal program. Node .* breaks the rule 'graph'",
        ),
        (
            lambda program, context: replace(program, graph=None),
            "Pass 'wrong' left a program that cannot be checked: AttributeError",
        ),
    ],
)
def test_a_wrong_pass_is_named(wrong: Any, message: str) -> None:
    register_pass("wrong")(wrong)
    with pytest.raises(PassError, match=message):
        run(("save", "wrong"), store_all(4, 1), CONTEXT)


@pytest.mark.usefixtures("fresh_registry")
def test_names_are_unique_known_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pass_names(" save, recompute,") == ("save", "recompute")
    with pytest.raises(PassError, match=r"'save' of .*second.* is taken by reroll\.passes\.program\.save"):

        @register_pass("save")
        def second(program: Program, _context: Context) -> Program:
            return program

    with pytest.raises(PassError, match="Did you mean 'recompute'"):
        find("recompose")
    with pytest.raises(PassError, match="work on loops, step, half, program"):
        register_pass("odd", on="graph")  # type: ignore[arg-type]


@pytest.mark.usefixtures("fresh_registry")
def test_entry_points_are_loaded_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("plugin", "toy:reference", PASSES.group),
        EntryPoint("broken", "no_such_module:nothing", PASSES.group),
        EntryPoint("save", "toy:play", PASSES.group),
    ]
    monkeypatch.setattr("reroll.words.registry.entry_points", lambda group: points)
    assert find("plugin").make() is reference
    with pytest.raises(PassError, match="'broken' of the entry point no_such_module:nothing cannot be imported"):
        find("broken")
    with pytest.raises(PassError, match=r"'save' of reroll\.passes\.program\.save:save is taken by the entry point"):
        find("save")
    monkeypatch.setattr(PASSES, "_points", None)
    points.append(EntryPoint("plugin", "toy:built", PASSES.group))
    with pytest.raises(PassError, match="toy:reference and as toy:built"):
        find("recompute")
