"""The verifier refuses every mutant that gives a wrong result, and names the node and the rule."""

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import pytest
from torch import fx

from mutants import mutants
from reroll.errors import IllegalProgramError
from reroll.passes import DEFAULT_PASSES
from reroll.program import verifier
from reroll.program.context import Context
from reroll.program.program import (
    Node,
    Program,
    advance,
    backward,
    offload,
    recompute,
    reload,
    save,
    store_all,
    tape,
    turn,
)
from reroll.program.registry import run
from reroll.program.verifier import Sizes, check, verify
from reroll.schedules.interval import Interval
from toy import DECIDE, Outcome, built, play, reference


def outcome(program: Program) -> Outcome | None:
    """What the independent interpreter makes of a program; None if it fails."""
    try:
        return play(program)
    except (AssertionError, KeyError, IndexError, TypeError, AttributeError, ValueError, StopIteration):
        return None


def refusal(program: Program) -> str | None:
    try:
        check(program)
    except IllegalProgramError as error:
        return str(error)
    return None


PAIR = Interval(2, children=(Interval(1), Interval(1, taped=True)))
NESTED = Interval(7, children=(Interval(5, children=(PAIR, PAIR, Interval(1, taped=True))), Interval(2, taped=True)))
DISK = Interval(3, "disk", (Interval(1, "disk"), Interval(2, "disk")))
SPELLED_OUT = Interval(6, children=(DISK, DISK))
PROGRAMS = {
    "store_all": lambda: built("store_all", 4, 1, 1),
    "saved": lambda: built("standard", 5, 2, 1, passes="save"),
    "standard": lambda: built("standard", 5, 2, 1),
    "remote": lambda: built("remote", 5, 2, 1, passes=DEFAULT_PASSES),
    "hierarchical": lambda: built("hierarchical", 6, 4, 2, passes=DEFAULT_PASSES),
    "double": lambda: built("double", 5, 3, 2, passes=DEFAULT_PASSES),
    "double_merged": lambda: built("double_merged", 6, 3, 3),
    "nested": lambda: run(DEFAULT_PASSES, store_all(7, 1), Context(NESTED)),
    "spelled out": lambda: run(DECIDE, store_all(6, 1), Context(SPELLED_OUT)),
    "trimmed": lambda: built("double_merged", 7, 4, 2, passes=DECIDE + ",trim"),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_harmful_mutant_is_refused(name: str) -> None:
    program = PROGRAMS[name]()
    expected, refused, every = reference(program.steps), 0, 0
    for mutant in mutants(program):
        every += 1
        message = refusal(mutant)
        if message is None:
            assert outcome(mutant) == expected, f"accepted, but wrong:\n{program}\n{mutant}"
            continue
        refused += 1
        named = re.match(r"Node '(\w+)' breaks the rule '(\w+)': .+\. .+\.( It is in part '\w+'\.)?$", message)
        assert named, message
        assert named[1] in {node.name for graph in mutant.graphs for node in graph.nodes}
        assert f"- ``{named[2]}``:" in (verifier.__doc__ or "")
    assert every > 20
    assert refused / every > 0.85


@cache
def harmful() -> list[Program]:
    kept = (KEPT[0], ("run", advance, "kept", 0, 4), KEPT[2])
    programs = [PROGRAMS["double_merged"](), program_of(*kept, *AGAIN)]
    return [each for program in programs for each in mutants(program) if outcome(each) != reference(program.steps)]


@pytest.mark.parametrize("rule", ["register", "position", "frontier"])
def test_without_a_rule_harmful_mutants_pass(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation test can fail: it needs every one of these rules."""
    refuse: Callable[..., NoReturn] = verifier.refuse

    def lenient(node: Node, broken: str, found: str, remedy: str) -> None:
        if broken != rule:
            refuse(node, broken, found, remedy)

    monkeypatch.setattr(verifier, "refuse", lenient)
    assert any(refusal(mutant) is None for mutant in harmful())


def program_of(*instructions: tuple[Any, ...], steps: int = 4, segment: int = 1) -> Program:
    """A program from (name, instruction, operands ...), where a string operand names a node; the last is the output."""
    graph = fx.Graph()
    nodes: dict[Any, Node] = {"carry": graph.placeholder("carry")}

    def resolve(operand: Any) -> Any:
        if isinstance(operand, tuple):
            return tuple(nodes[each] for each in operand)
        return nodes.get(operand, operand)

    for name, target, *operands in instructions:
        nodes[name] = graph.create_node("call_function", target, tuple(map(resolve, operands)), name=name)
    graph.output(list(nodes.values())[-1])
    return Program(graph, steps, segment)


WHOLE = ("whole", tape, "carry", 0, 4)
TURN = ("turned", turn, "whole")
BACK = ("back", backward, "whole", "turned")
HALF = ("half", tape, "carry", 0, 2)
REST = ("rest", tape, "half", 2, 4)
ENDED = ("ended", turn, "rest")
LATE = ("late", backward, "rest", "ended")
KEPT = (("kept", save, "carry"), ("run", advance, "carry", 0, 4), ("over", turn, "run"))
AGAIN = (("again", tape, "kept", 0, 4), ("end", backward, "again", "over"))

ILLEGAL: dict[str, tuple[tuple[tuple[Any, ...], ...], str]] = {
    "graph: alien": ((("odd", len, "carry"),), r"'odd' breaks the rule 'graph': call_function <.*len> is no instr"),
    "graph: arity": ((("odd", save, "carry", 3),), "'odd' breaks the rule 'graph': it has 2 operands by position"),
    "operand: not a node": ((("odd", save, 3),), "'odd' breaks the rule 'operand': it reads 3, which is not a node"),
    "operand: kind": ((WHOLE, ("odd", backward, "carry", "whole")), "reads 'carry', a carry, where a tape belongs"),
    "operand: block": ((("out", offload, ("carry",), "disk"), ("odd", save, "out")), "'out', a block, where a carry"),
    "operand: reversed": (
        (WHOLE, TURN, BACK, ("odd", save, "whole")),
        "'whole', a reversed tape, where a carry or tape",
    ),
    "operand: empty block": ((("odd", offload, (), "disk"),), r"'odd' breaks the rule 'operand': it writes \(\)"),
    "operand: local": ((("odd", offload, ("carry",), "local"),), "its tier is 'local'. Name a remote tier"),
    "operand: pick": (
        (("out", offload, ("carry",), "disk"), ("in", reload, "out"), ("odd", operator.getitem, "in", 1)),
        "'odd' breaks the rule 'operand': it picks carry 1 of a block of 1",
    ),
    "register": (
        (WHOLE, ("odd", save, "carry")),
        "'register': the carry of 'carry' was lost when 'whole' ran. Save the",
    ),
    "range: empty": ((("odd", tape, "carry", 0, 0),), r"'range': its range is \[0, 0\)"),
    "range: beyond": ((("odd", tape, "carry", 0, 5),), r"'range': its range is \[0, 5\)"),
    "range: type": ((("odd", tape, "carry", 0, 2.0),), r"'range': its range is \[0, 2.0\)"),
    "position": ((HALF, ("odd", tape, "half", 3, 4)), "'position': it starts at step 3 from the carry at step 2"),
    "position: grad": ((HALF, REST, ENDED, LATE, ("odd", backward, "half", "ended")), "gradient at step 4 for a tape"),
    "reverse: rest": ((HALF, REST, ENDED, LATE), "'reverse': steps .0, 2. were not reversed"),
    "frontier: twice": ((*KEPT, ("odd", advance, "kept", 0, 4)), "'frontier': it runs step 0 for the first time, but"),
    "frontier: early": ((("odd", recompute, "carry", 0, 2),), "'frontier': it runs up to step 2 again, but the front"),
    "turn: early": ((HALF, ("odd", turn, "half")), "'turn': it turns at step 2 with the frontier at 2"),
    "turn: twice": ((WHOLE, TURN, ("odd", turn, "whole")), "'turn': the program turned at 'turned' already"),
    "turn: never": ((WHOLE,), "'output' breaks the rule 'turn': the program ends without a turn"),
    "reverse: order": ((HALF, REST, ENDED, ("odd", backward, "half", "ended")), "'reverse': it reverses steps .0, 2."),
    "reverse: idle tape": ((*KEPT, ("idle", tape, "kept", 0, 2), *AGAIN), "'idle' breaks the rule 'reverse': no back"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_each_rule_has_its_sentence(case: str) -> None:
    instructions, message = ILLEGAL[case]
    with pytest.raises(IllegalProgramError, match=message) as caught:
        verify(program_of(*instructions))
    assert f"breaks the rule {case.partition(':')[0]!r}" in str(caught.value)


def test_segments_are_not_cut_except_by_the_end() -> None:
    verify(program_of(("a", tape, "carry", 0, 2), ("b", tape, "a", 2, 3), ("t", turn, "b"), ("x", backward, "b", "t"),
                      ("y", backward, "a", "x"), steps=3, segment=2))  # fmt: skip
    with pytest.raises(IllegalProgramError, match="'range': it cuts a segment of 2 steps at step 1"):
        verify(program_of(("a", tape, "carry", 0, 1), steps=3, segment=2))


def test_shape_of_the_graph() -> None:
    program = store_all(4, 1)
    program.graph.placeholder("second")
    with pytest.raises(IllegalProgramError, match="'second' breaks the rule 'graph'"):
        check(program)
    graph = fx.Graph()
    graph.placeholder("carry")
    with pytest.raises(IllegalProgramError, match=r"'carry' breaks the rule 'graph'.*End with an output"):
        check(Program(graph, 4, 1))


def test_keywords_are_codecs_with_one_name_per_tensor() -> None:
    program = program_of(*KEPT, *AGAIN)
    kept = next(node for node in program.graph.nodes if node.name == "kept")
    kept.kwargs = {"codec": ("bits", "raw")}
    assert verify(program).local_peak == 5
    kept.kwargs = {"codec": ("bits", 3)}
    with pytest.raises(IllegalProgramError, match="'kept' breaks the rule 'codec'"):
        check(program)
    kept.kwargs = {"level": 3}
    with pytest.raises(IllegalProgramError, match=r"'kept' breaks the rule 'graph': it has the keywords .'level'."):
        check(program)


@pytest.mark.parametrize("keywords", [{"thin": 1}, {"thin": True, "codec": ()}, {"codec": ("raw",)}])
def test_a_tape_is_thin_or_not(keywords: dict[str, Any]) -> None:
    program = built("standard", 4, 2, 1)
    taped = next(node for node in program.graph.nodes if node.target is tape)
    taped.kwargs = {"thin": True}
    less = Sizes(tape_step=10, thin=lambda start, stop: 3 * (stop - start))
    assert verify(program, sizes=less).local_peak < verify(built("standard", 4, 2, 1), sizes=less).local_peak
    taped.kwargs = keywords
    with pytest.raises(IllegalProgramError, match=f"{taped.name!r} breaks the rule 'graph': it has the keywords"):
        check(program)


def test_capacities_are_kept_in_the_units_of_the_sizes() -> None:
    program = built("double", 16, 4, 2)
    sizes = Sizes(carry=100, tape_step=8)
    tally = verify(program, sizes=sizes)
    assert (tally.local_peak, tally.remote_peak) == (216, 400)
    verify(program, sizes=sizes, capacities={"local": 216, "disk": 400})
    with pytest.raises(
        IllegalProgramError, match="'reverse_12to16' breaks the rule 'capacity': tier 'local' would hold 216"
    ):
        verify(program, sizes=sizes, capacities={"local": 215})
    with pytest.raises(
        IllegalProgramError, match="'offload_at12' breaks the rule 'capacity': tier 'disk' would hold 400"
    ):
        verify(program, sizes=sizes, capacities={"disk": 399})


def test_tapes_may_have_sizes_of_their_own() -> None:
    program = built("standard", 9, 4, 1)
    assert verify(program, sizes=Sizes(taped=lambda start, stop: 7 if stop == 9 else 40)).local_peak == 42


def test_timeline_names_every_node_and_reaches_the_peak() -> None:
    program = built("hierarchical", 37, 10, 3, passes=DECIDE)
    tally = verify(program)
    assert [name for name, _ in tally.timeline] == [node.name for node in program.graph.nodes]
    assert max(units for _, units in tally.timeline) == tally.local_peak == 6
    assert dict(tally.timeline)[tally.peak_nodes["local"]] == tally.local_peak
    assert tally.timeline[-1][1] == 0
