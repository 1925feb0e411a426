"""Formulas give what the verifier counts, and what a machine of three streams takes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reroll.errors import OptionError
from reroll.formulas import COUNTED, LEGEND, SYMBOLS, C, Figures, K, T, a, formula, p, s
from reroll.program.context import Context
from reroll.program.program import Program, offload, store_all
from reroll.program.registry import run
from reroll.program.tally import Sizes
from reroll.program.verifier import verify
from reroll.schedules.interval import best_chunk, best_local_double, best_slots
from reroll.schedules.named import tree
from reroll.schedules.problem import Problem
from streams import Seconds, makespan
from toy import DECIDE

SCHEMES = (
    ("store_all", "disk"),
    ("standard", "disk"),
    ("remote", "disk"),
    ("hierarchical", "disk"),
    ("double", "disk"),
    ("double", "local"),
)
PREFETCHED = f"{DECIDE},prefetch"


def program(scheme: str, tier: str, numbers: dict[str, Any], passes: str = DECIDE) -> Program:
    steps, segment = numbers["steps"], numbers["segment"]
    root = tree(scheme, Problem(steps, segment, chunk=numbers["chunk"], slots=numbers["slots"], tier=tier))
    return run(passes, store_all(steps, segment), Context(root))


def counted(made: Program, sizes: Sizes) -> list[int]:
    tally = verify(made, sizes=sizes)
    assert tally.carries_written == tally.carries_read
    moved = [tally.reforward_steps, tally.remote_writes, tally.remote_reads, tally.carries_written]
    return [tally.local_peak, tally.remote_peak, *moved]


def of_formula(figures: Figures) -> list[float]:
    names = ("local_peak", "remote_peak", "rerun", "writes", "reads", "carries")
    return [float(getattr(figures, name)) for name in names]


@pytest.mark.variants(4)
@pytest.mark.parametrize(("scheme", "tier"), SCHEMES)
def test_counts_are_those_of_the_verifier_for_every_length(scheme: str, tier: str) -> None:
    """Of chunks and slots a few; benchmarks/formula_counts.py has all."""
    draw = random.Random(0)
    shapes = [(steps, chunk) for steps in range(1, 71) for chunk in (1, draw.randint(1, steps), steps, steps + 3)]
    rows = np.array([(*shape, draw.randint(1, shape[1])) for shape in shapes if draw.random() < 0.6])
    found = formula(scheme, tier).evaluate(**dict(zip(("steps", "chunk", "slots"), rows.T, strict=True)))
    for index, row in enumerate(rows.tolist()):
        numbers = {**dict(zip(("steps", "chunk", "slots"), row, strict=True)), "segment": 1}
        figures = Figures(*(getattr(found, name)[index] for name in COUNTED))
        assert of_formula(figures) == counted(program(scheme, tier, numbers), Sizes()), numbers


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Numbers of every kind; packed carries differ from local ones."""
    steps = draw(st.integers(1, 40))
    chunk = draw(st.integers(1, steps + 3))
    sizes = {name: draw(st.integers(1, 9)) for name in ("carry", "packed", "tape", "forward", "taping", "backward")}
    rates = {name: draw(st.sampled_from((0.1, 0.3, 1.0, 5.0))) for name in ("write", "read")}
    latency = draw(st.sampled_from((0.0, 0.5, 5.0, 20.0)))
    shape = {"steps": steps, "chunk": chunk, "slots": draw(st.integers(1, chunk)), "segment": draw(st.integers(1, 6))}
    return {**shape, **sizes, **rates, "latency": latency}


@pytest.mark.variants(4)
@pytest.mark.parametrize(("scheme", "tier"), SCHEMES)
@given(numbers=cases())
@settings(max_examples=60, deadline=None)
def test_sizes_segments_and_seconds(scheme: str, tier: str, numbers: dict[str, Any]) -> None:
    def blocks_packed(passes: str) -> Program:
        made = program(scheme, tier, numbers, passes)
        for node in made.graph.find_nodes(op="call_function", target=offload):
            node.kwargs = {"codec": ("packed",)}
        return made

    carry, packed = numbers["carry"], numbers["packed"]
    sizes = Sizes(carry, numbers["tape"], lambda codec: packed if codec else carry)
    figures = formula(scheme, tier).evaluate(**numbers)
    plain, ahead = blocks_packed(DECIDE), blocks_packed(PREFETCHED)
    assert of_formula(figures) == counted(plain, sizes)
    assert figures.prefetched_peak == verify(ahead, sizes=sizes).local_peak
    names = ("forward", "taping", "backward", "write", "read", "latency", "packed")
    seconds = Seconds(*(numbers[name] for name in names))
    assert figures.blocking == pytest.approx(makespan(plain, seconds, overlapped=False))
    assert figures.overlapped == pytest.approx(makespan(ahead, seconds, overlapped=True))


def test_full_expressions_are_in_letters_alone() -> None:
    numbers = {"steps": 23, "chunk": 7, "slots": 3, "segment": 2, "carry": 5, "packed": 3, "tape": 2, "write": 7}
    numbers |= {"forward": 2, "taping": 3, "backward": 4, "read": 11, "latency": 1}
    for scheme, name in (("hierarchical", "local_peak"), ("double", "overlapped")):
        figures = formula(scheme).evaluate(**numbers)
        full = formula(scheme).full(name)
        assert full.free_symbols <= set(SYMBOLS.values())
        number = full.subs({SYMBOLS[each]: value for each, value in numbers.items()})
        assert float(number) == pytest.approx(float(getattr(figures, name)))


def test_best_numbers_are_derived() -> None:
    standard, remote, double = formula("standard"), formula("remote"), formula("double")
    assert standard.best == {C: sympy.sqrt(T * s / a)}
    assert sympy.simplify(standard.best_peak - 2 * sympy.sqrt(T * s * a)) == 0
    assert remote.best == {C: sympy.sqrt(T * p / a)}
    assert double.best[K] == sympy.sqrt(C * a / s)
    assert double.best_peak.subs({a: s, p: s}) == 2 * s * T ** sympy.Rational(1, 4)
    assert formula("hierarchical").best[K] == sympy.sqrt(C * a / p)
    local, third = formula("double", "local"), sympy.Rational(1, 3)
    assert sympy.simplify(local.best[C] - (T**2 * s / a) ** third) == 0
    assert sympy.simplify(local.best[K] - (T * a / s) ** third) == 0
    assert sympy.simplify(local.best_peak - 3 * (T * s**2 * a) ** third) == 0


@given(steps=st.integers(1, 10**5), carry=st.integers(1, 9), tape=st.integers(1, 9))
@example(steps=50_000, carry=7, tape=1)
@settings(max_examples=60, deadline=None)
def test_plans_take_the_best_numbers(steps: int, carry: int, tape: int) -> None:
    def number(scheme: str, letter: sympy.Symbol, tier: str = "disk", **more: int) -> float:
        values = {T: steps, s: carry, p: carry, a: tape, **{SYMBOLS[name]: value for name, value in more.items()}}
        return float(formula(scheme, tier).best[letter].subs(values))

    chunk = best_chunk(steps, carry, tape)
    for scheme in ("standard", "remote", "hierarchical", "double"):
        assert chunk == min(max(round(number(scheme, C)), 1), steps)
    assert abs(best_slots(chunk, carry, tape) - min(max(number("double", K, chunk=chunk), 1), chunk)) <= 2
    figures = formula("double", "local").evaluate
    chunk, slots = best_local_double(steps, carry, tape)
    rounded = min(max(round(number("double", C, "local")), 1), steps), max(round(number("double", K, "local")), 1)
    least = figures(steps=steps, carry=carry, tape=tape, chunk=chunk, slots=slots).local_peak
    other = figures(steps=steps, carry=carry, tape=tape, chunk=rounded[0], slots=rounded[1]).local_peak
    assert least <= other + 2 * carry + tape  # a short last chunk may gain that much


@pytest.mark.parametrize(("scheme", "tier"), SCHEMES)
def test_the_smooth_form_is_the_limit(scheme: str, tier: str) -> None:
    numbers = {T: 10**7, C: 3001, K: 47, s: 7, p: 7, a: 5}
    found = formula(scheme, tier).evaluate(steps=10**7, chunk=3001, slots=47, carry=7, tape=5)
    assert float(found.local_peak) == pytest.approx(float(formula(scheme, tier).smooth_peak.subs(numbers)), rel=0.03)
    assert float(found.remote_peak) == pytest.approx(float(formula(scheme, tier).smooth_remote.subs(numbers)), rel=0.03)


def test_reads_hide_from_a_chunk_on() -> None:
    remote = formula("remote")
    numbers = {"segment": 1, "packed": 1, "taping": 1.0, "backward": 2.0, "read": 0.01, "latency": 20.0}
    assert remote.hiding is not None
    hiding = remote.hiding.subs({SYMBOLS[name]: value for name, value in numbers.items()})
    assert float(hiding) == pytest.approx(40)
    numbers |= {"steps": 10**4, "forward": 1.0, "write": 10.0}
    hidden, shown = (remote.evaluate(**numbers, chunk=chunk) for chunk in (40, 39))
    work, first_read = 4.0 * 10**4, 120.0
    assert hidden.overlapped == pytest.approx(work + first_read)
    assert shown.overlapped > hidden.overlapped + 500
    assert hidden.blocking == pytest.approx(work + 250 * (20 + 0.1) + 250 * first_read)


@pytest.mark.parametrize(("scheme", "tier"), SCHEMES)
def test_a_description_explains_its_letters(scheme: str, tier: str) -> None:
    found = formula(scheme, tier)
    text = found.describe()
    assert text.startswith(f"{found.name}: {found.summary}")
    for letter in {letter for name in COUNTED for letter in getattr(found, name).free_symbols}:
        assert f"\n  {letter}: " in text or f"\n  {letter} = " in text
    assert all(
        f"\n  {letter}: {meaning}" not in text for letter, meaning in LEGEND.values() if f" {letter}" not in text
    )


def test_best_numbers_are_written_under_one_root() -> None:
    assert "best C              sqrt(T*s/a)\n" in formula("standard").describe()
    assert "best peak           3*(T*a*s**2)**(1/3)\n" in formula("double", "local").describe()


def test_wrong_names_are_sentences() -> None:
    with pytest.raises(OptionError, match=r"no formula of 'doubel'. Did you mean 'double'"):
        formula("doubel")
    with pytest.raises(OptionError, match="no number 'chunks'\\. Its numbers are steps, chunk"):
        formula("double").evaluate(steps=4, chunks=2)
    with pytest.raises(OptionError, match="without steps"):
        formula("double").evaluate(chunk=2)
