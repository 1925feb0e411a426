"""What each pass on training programs does: a program of a few steps before it, and behind it."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest
import torch

from reroll.errors import PassError
from reroll.program.context import Context
from reroll.program.program import Program
from reroll.program.registry import register_pass, run
from reroll.schedules.interval import Interval
from reroll.segment.facts import Fact, bits
from text import program_of, program_text
from toy import play, reference

FACTS = (bits(torch.float32), Fact(torch.float32))  # a tensor of spikes, and one of which nothing is known


def context(*children: Interval) -> Context:
    """What a schedule of these intervals says."""
    return Context(Interval(sum(child.steps for child in children), children=children))


def behind(passes: str, before: str, given: Context) -> str:
    """The program behind the passes, which are seen to keep its results."""
    program = program_of(before, given.root.steps)
    assert program_text(program) == before
    found = run(passes, program, given)
    assert play(found) == reference(program.steps)
    return program_text(found)


STORE_ALL = dedent("""\
    taped = tape(carry, 0, 4)
    end = turn(taped)
    grad = backward(taped, end)
    return grad
    """)


def test_sparsity_writes_down_what_is_known_of_the_carry() -> None:
    known = replace(context(Interval(4)), facts=FACTS)
    assert behind("sparsity", STORE_ALL, known) == "# carry: {0, 1}; unknown\n" + STORE_ALL
    assert behind("sparsity", STORE_ALL, replace(known, facts=())) == STORE_ALL


def test_save_cuts_the_tape_into_the_intervals_and_keeps_their_first_carries() -> None:
    """No carry is kept of an interval whose tape is."""
    given = context(Interval(2), Interval(1), Interval(1, taped=True))
    assert behind("save", STORE_ALL, given) == dedent("""\
        save_at0 = save(carry)
        tape_0to2 = tape(carry, 0, 2)
        save_at2 = save(tape_0to2)
        tape_2to3 = tape(tape_0to2, 2, 3)
        tape_3to4 = tape(tape_2to3, 3, 4)
        end = turn(tape_3to4)
        backward_3to4 = backward(tape_3to4, end)
        backward_2to3 = backward(tape_2to3, backward_3to4)
        backward_0to2 = backward(tape_0to2, backward_2to3)
        return backward_0to2
        """)
    same = STORE_ALL.replace("taped", "tape_0to4").replace("grad", "backward_0to4")
    assert behind("save", STORE_ALL, Context(Interval(4))) == same


SAVED = dedent("""\
    save_at0 = save(carry)
    tape_0to2 = tape(carry, 0, 2)
    save_at2 = save(tape_0to2)
    tape_2to4 = tape(tape_0to2, 2, 4)
    end = turn(tape_2to4)
    backward_2to4 = backward(tape_2to4, end)
    backward_0to2 = backward(tape_0to2, backward_2to4)
    return backward_0to2
    """)


def test_recompute_makes_a_tape_of_the_forward_again_from_the_kept_carry() -> None:
    assert behind("recompute", SAVED, context(Interval(2), Interval(2))) == dedent("""\
        save_at0 = save(carry)
        advance_0to2 = advance(carry, 0, 2)
        save_at2 = save(advance_0to2)
        advance_2to4 = advance(advance_0to2, 2, 4)
        end = turn(advance_2to4)
        tape_2to4 = tape(save_at2, 2, 4)
        backward_2to4 = backward(tape_2to4, end)
        tape_0to2 = tape(save_at0, 0, 2)
        backward_0to2 = backward(tape_0to2, backward_2to4)
        return backward_0to2
        """)


def test_recompute_writes_equal_intervals_down_once() -> None:
    """An interval of intervals keeps their carries when it is run again."""
    nested = Interval(2, children=(Interval(1), Interval(1)))
    assert behind("recompute", SAVED, context(nested, nested)) == dedent("""\
        def part0_of2(carry, grad):
            recompute_0to1 = recompute(carry, 0, 1)
            save_at1 = save(recompute_0to1)
            recompute_1to2 = recompute(recompute_0to1, 1, 2)
            tape_1to2 = tape(save_at1, 1, 2)
            backward_1to2 = backward(tape_1to2, grad)
            tape_0to1 = tape(carry, 0, 1)
            backward_0to1 = backward(tape_0to1, backward_1to2)
            return backward_0to1

        save_at0 = save(carry)
        advance_0to2 = advance(carry, 0, 2)
        save_at2 = save(advance_0to2)
        advance_2to4 = advance(advance_0to2, 2, 4)
        end = turn(advance_2to4)
        reverse_2to4 = reverse(save_at2, end, 'part0_of2', 2)
        reverse_0to2 = reverse(save_at0, reverse_2to4, 'part0_of2', 0)
        return reverse_0to2
        """)


def test_recompute_leaves_tapes_that_the_schedule_keeps_and_those_without_a_saved_carry() -> None:
    kept = Interval(2, taped=True)
    assert behind("recompute", SAVED, context(kept, kept)) == SAVED
    assert behind("recompute", STORE_ALL, context(Interval(4))) == STORE_ALL


RECOMPUTED = dedent("""\
    save_at0 = save(carry)
    advance_0to2 = advance(carry, 0, 2)
    save_at2 = save(advance_0to2)
    advance_2to4 = advance(advance_0to2, 2, 4)
    end = turn(advance_2to4)
    tape_2to4 = tape(save_at2, 2, 4)
    backward_2to4 = backward(tape_2to4, end)
    tape_0to2 = tape(save_at0, 0, 2)
    backward_0to2 = backward(tape_0to2, backward_2to4)
    return backward_0to2
    """)


def test_offload_writes_the_carry_of_a_remote_interval_and_reads_it_back() -> None:
    """That of the local interval stays."""
    assert behind("offload", RECOMPUTED, context(Interval(2, "disk"), Interval(2))) == dedent("""\
        offload_at0 = offload((carry,), 'disk')
        advance_0to2 = advance(carry, 0, 2)
        save_at2 = save(advance_0to2)
        advance_2to4 = advance(advance_0to2, 2, 4)
        end = turn(advance_2to4)
        tape_2to4 = tape(save_at2, 2, 4)
        backward_2to4 = backward(tape_2to4, end)
        reload_at0 = reload(offload_at0)
        carry_at0 = getitem(reload_at0, 0)
        tape_0to2 = tape(carry_at0, 0, 2)
        backward_0to2 = backward(tape_0to2, backward_2to4)
        return backward_0to2
        """)


def test_offload_moves_the_carries_of_a_block_together() -> None:
    block = Interval(2, "disk", block=0)
    assert behind("offload", RECOMPUTED, context(block, block)) == dedent("""\
        save_at0 = save(carry)
        advance_0to2 = advance(carry, 0, 2)
        save_at2 = save(advance_0to2)
        offload_at0 = offload((save_at0, save_at2), 'disk')
        advance_2to4 = advance(advance_0to2, 2, 4)
        end = turn(advance_2to4)
        reload_at0 = reload(offload_at0)
        carry_at2 = getitem(reload_at0, 1)
        tape_2to4 = tape(carry_at2, 2, 4)
        backward_2to4 = backward(tape_2to4, end)
        carry_at0 = getitem(reload_at0, 0)
        tape_0to2 = tape(carry_at0, 0, 2)
        backward_0to2 = backward(tape_0to2, backward_2to4)
        return backward_0to2
        """)


def test_offload_leaves_what_is_local_and_what_nobody_reads() -> None:
    assert behind("offload", RECOMPUTED, context(Interval(2), Interval(2))) == RECOMPUTED
    assert behind("offload", SAVED, context(Interval(2, "disk"), Interval(2, "disk"))) == SAVED


READ_BY_FORWARD = dedent("""\
    save_at0 = save(carry)
    advance_0to2 = advance(carry, 0, 2)
    save_at2 = save(advance_0to2)
    offload_at2 = offload((advance_0to2,), 'disk')
    advance_2to4 = advance(save_at2, 2, 4)
    end = turn(advance_2to4)
    reload_at2 = reload(offload_at2)
    carry_at2 = getitem(reload_at2, 0)
    tape_2to4 = tape(carry_at2, 2, 4)
    backward_2to4 = backward(tape_2to4, end)
    tape_0to2 = tape(save_at0, 0, 2)
    backward_0to2 = backward(tape_0to2, backward_2to4)
    return backward_0to2
    """)


@pytest.mark.parametrize(("asked", "rounded"), [("auto", "sparse"), ("int8", "int8")])
def test_compress_names_codecs_and_rounds_nothing_that_the_forward_reads(asked: str, rounded: str) -> None:
    """The first carry is there anyway, so it is kept as it is."""
    given = replace(context(Interval(2), Interval(2, "disk")), facts=FACTS, codec=asked)
    assert behind("sparsity, compress", READ_BY_FORWARD, given) == dedent(f"""\
        # carry: {{0, 1}}; unknown
        save_at0 = save(carry)
        advance_0to2 = advance(carry, 0, 2)
        save_at2 = save(advance_0to2, codec=('bits', 'sparse'))
        offload_at2 = offload((advance_0to2,), 'disk', codec=('bits', '{rounded}'))
        advance_2to4 = advance(save_at2, 2, 4)
        end = turn(advance_2to4)
        reload_at2 = reload(offload_at2)
        carry_at2 = getitem(reload_at2, 0)
        tape_2to4 = tape(carry_at2, 2, 4)
        backward_2to4 = backward(tape_2to4, end)
        tape_0to2 = tape(save_at0, 0, 2)
        backward_0to2 = backward(tape_0to2, backward_2to4)
        return backward_0to2
        """)


def test_compress_does_nothing_without_facts_and_when_it_is_told_so() -> None:
    given = replace(context(Interval(2), Interval(2, "disk")), facts=FACTS)
    assert behind("compress", READ_BY_FORWARD, given) == READ_BY_FORWARD
    plain = "# carry: {0, 1}; unknown\n" + READ_BY_FORWARD
    assert behind("sparsity, compress", READ_BY_FORWARD, replace(given, codec="none")) == plain


OFFLOADED = dedent("""\
    offload_at0 = offload((carry,), 'disk')
    advance_0to2 = advance(carry, 0, 2)
    offload_at2 = offload((advance_0to2,), 'disk')
    advance_2to3 = advance(advance_0to2, 2, 3)
    offload_at3 = offload((advance_2to3,), 'disk')
    advance_3to4 = advance(advance_2to3, 3, 4)
    end = turn(advance_3to4)
    reload_at3 = reload(offload_at3)
    carry_at3 = getitem(reload_at3, 0)
    tape_3to4 = tape(carry_at3, 3, 4)
    backward_3to4 = backward(tape_3to4, end)
    reload_at2 = reload(offload_at2)
    carry_at2 = getitem(reload_at2, 0)
    tape_2to3 = tape(carry_at2, 2, 3)
    backward_2to3 = backward(tape_2to3, backward_3to4)
    reload_at0 = reload(offload_at0)
    carry_at0 = getitem(reload_at0, 0)
    tape_0to2 = tape(carry_at0, 0, 2)
    backward_0to2 = backward(tape_0to2, backward_2to3)
    return backward_0to2
    """)


def test_prefetch_starts_to_read_a_block_before_the_work_on_the_block_read_before_it() -> None:
    given = context(Interval(2, "disk"), Interval(1, "disk"), Interval(1, "disk"))
    assert behind("prefetch", OFFLOADED, given) == dedent("""\
        offload_at0 = offload((carry,), 'disk')
        advance_0to2 = advance(carry, 0, 2)
        offload_at2 = offload((advance_0to2,), 'disk')
        advance_2to3 = advance(advance_0to2, 2, 3)
        offload_at3 = offload((advance_2to3,), 'disk')
        advance_3to4 = advance(advance_2to3, 3, 4)
        end = turn(advance_3to4)
        reload_at3 = reload(offload_at3)
        carry_at3 = getitem(reload_at3, 0)
        reload_at2 = reload(offload_at2)
        tape_3to4 = tape(carry_at3, 3, 4)
        backward_3to4 = backward(tape_3to4, end)
        carry_at2 = getitem(reload_at2, 0)
        reload_at0 = reload(offload_at0)
        tape_2to3 = tape(carry_at2, 2, 3)
        backward_2to3 = backward(tape_2to3, backward_3to4)
        carry_at0 = getitem(reload_at0, 0)
        tape_0to2 = tape(carry_at0, 0, 2)
        backward_0to2 = backward(tape_0to2, backward_2to3)
        return backward_0to2
        """)
    assert behind("prefetch", OFFLOADED, replace(given, ahead=False)) == OFFLOADED
    assert behind("prefetch", RECOMPUTED, given) == RECOMPUTED


def test_trim_drops_what_nobody_reads_and_saves_of_what_is_still_there() -> None:
    before = dedent("""\
        save_at0 = save(carry)
        advance_0to2 = advance(carry, 0, 2)
        save_at2 = save(advance_0to2)
        offload_at2 = offload((save_at2,), 'disk')
        advance_2to4 = advance(save_at2, 2, 4)
        end = turn(advance_2to4)
        reload_at2 = reload(offload_at2)
        carry_at2 = getitem(reload_at2, 0)
        recompute_0to2 = recompute(save_at0, 0, 2)
        save_at2_again = save(recompute_0to2)
        recompute_2to4 = recompute(recompute_0to2, 2, 4)
        tape_2to4 = tape(save_at2_again, 2, 4)
        backward_2to4 = backward(tape_2to4, end)
        tape_0to2 = tape(save_at0, 0, 2)
        backward_0to2 = backward(tape_0to2, backward_2to4)
        return backward_0to2
        """)
    assert behind("trim", before, Context(Interval(4))) == dedent("""\
        save_at0 = save(carry)
        advance_0to2 = advance(carry, 0, 2)
        advance_2to4 = advance(advance_0to2, 2, 4)
        end = turn(advance_2to4)
        recompute_0to2 = recompute(save_at0, 0, 2)
        tape_2to4 = tape(recompute_0to2, 2, 4)
        backward_2to4 = backward(tape_2to4, end)
        tape_0to2 = tape(save_at0, 0, 2)
        backward_0to2 = backward(tape_0to2, backward_2to4)
        return backward_0to2
        """)
    assert behind("trim", RECOMPUTED, Context(Interval(4))) == RECOMPUTED


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize(
    ("name", "before", "right", "wrong", "rule"),
    [
        ("save", STORE_ALL, "tape(tape_0to2, 2, 4)", "tape(carry, 2, 4)", "register"),
        ("recompute", SAVED, "tape(save_at2, 2, 4)", "tape(advance_0to2, 2, 4)", "register"),
        ("offload", RECOMPUTED, "tape(carry_at2, 2, 4)", "tape(reload_at2, 2, 4)", "operand"),
        ("compress", READ_BY_FORWARD, "codec=('bits', 'sparse')", "codec=('bits',)", "codec"),
        ("prefetch", OFFLOADED, "reload(offload_at0)", "reload(offload_at2)", "position"),
        ("trim", RECOMPUTED, "tape(save_at0, 0, 2)", "tape(carry, 0, 2)", "register"),
    ],
)
def test_one_wrong_operand_is_refused(name: str, before: str, right: str, wrong: str, rule: str) -> None:
    given = replace(context(Interval(2, "disk"), Interval(2, "disk")), facts=FACTS)
    text = behind(f"sparsity, {name}", before, given)
    assert right in text

    @register_pass("own")
    def own(program: Program, _context: Context) -> Program:
        return replace(program, graph=program_of(text.replace(right, wrong), 4).graph)

    with pytest.raises(PassError, match=f"Pass 'own' returned an illegal program.* breaks the rule '{rule}'"):
        run("sparsity, own", program_of(before, 4), given)
