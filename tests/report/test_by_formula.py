"""What a report says by formula is what it says elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from reports import COSTS, loop, report
from reroll.report.by_formula import Line
from reroll.report.report import Loop
from reroll.schedules.problem import Problem

ALONE = replace(COSTS, segments={1: COSTS.segments[1]})


def lines(found: Loop) -> dict[str, Line]:
    return {line.name: line for line in found.by_formula().lines}


@pytest.mark.parametrize("schedule", ["store_all", "standard", "remote", "hierarchical", "double"])
@pytest.mark.parametrize(("steps", "chunk", "slots"), [(24, 6, 2), (23, 7, 3), (5, 5, 1)])
def test_the_exact_number_is_the_one_that_was_counted(schedule: str, steps: int, chunk: int, slots: int) -> None:
    found = lines(loop(schedule, steps, chunk, slots, costs=ALONE))
    remote = {"disk peak"} if schedule in ("remote", "hierarchical", "double") else set[str]()
    again = {"steps re-run"} if schedule != "store_all" else set[str]()
    assert {"local peak", "time"} | remote | again == {name for name, line in found.items() if line.exact is not None}
    for line in found.values():
        if line.exact is not None:
            assert line.exact == pytest.approx(line.counted)
    assert found["local peak"].smooth == pytest.approx(found["local peak"].exact, rel=0.5)
    if steps % chunk == 0:
        assert found["time"].smooth == pytest.approx(found["time"].exact)


def test_the_best_numbers_stand_beside_those_of_the_plan() -> None:
    found = lines(loop("standard", steps=128, chunk=6))
    assert (found["best C"].text, found["best C"].shown("smooth"), found["best C"].counted) == ("sqrt(T*s/a)", "8", 6)
    assert (found["peak with best"].text, found["peak with best"].smooth) == ("2*sqrt(T*a*s)", 160)
    assert found["local peak"].smooth == pytest.approx(128 * 5 / 6 + 6 * 10)
    assert lines(loop("double"))["best K"].counted == 2


def test_it_is_printed_a_line_for_each_formula() -> None:
    found = loop("standard", steps=128, chunk=6).by_formula()
    printed = str(found).splitlines()
    assert len(printed) == len(found.lines) + 1
    assert f"best C: sqrt(T*s/a) = about 8, here {found.lines[-2].counted}" in printed
    assert printed[-1] == found.text()


def test_without_costs_no_number_of_seconds_is_given() -> None:
    (time,) = (line for line in loop().by_formula().lines if line.name == "time")
    assert (time.smooth, time.exact, time.counted) == (None, None, None)
    assert "forward" not in loop().by_formula().letters


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("steps", [2, 9, 15])
def test_revolve_in_slots_is_a_binomial(steps: int, slots: int) -> None:
    made = loop("revolve", steps, slots=slots)
    (line,) = made.by_formula().lines
    assert line.exact == line.counted == made.tally.reforward_steps
    assert "Griewank and Walther" in made.by_formula().note


def test_without_a_closed_form_the_report_says_what_holds() -> None:
    made = loop()
    problem = Problem(24, 1, 5, 10, memory=60, tier="disk", write=0.5, read=0.25)

    def said(schedule: str, problem: Problem) -> str:
        choice = replace(made.choice, schedule=schedule, problem=problem)
        found = replace(made, plan=replace(made.plan, choice=choice)).by_formula()
        assert not found.lines
        return found.text()

    assert "no closed form of 'revolve' in bytes" in said("revolve", problem)
    assert "transfers included, and no schedule" in said("hrevolve", problem)
    assert said("revolve", replace(problem, memory=240)) == "All segments are taped, so no step runs again."
    assert said("every_k", problem) == "There is no formula of 'every_k': its peaks, steps and transfers were counted."


def test_the_table_the_page_and_the_json_show_the_same() -> None:
    made = loop(costs=ALONE)
    shown = report(made)
    text, page = shown.text(80), shown._repr_html_()
    data = json.loads(json.dumps(shown.to_json()["recurrences"][0]["formulas"], allow_nan=False))
    for line, row in zip(data["lines"], made.by_formula().rows(), strict=True):
        assert row[:2] == [line["name"], line["text"]]
        assert row[1] in page
        assert all(cell in " ".join(text.split()) for cell in row if cell != row[1])
    assert "C*a/K + K*s 40 B 45 B 45 B" in " ".join(text.split())
    assert "tape a = 10 B" in " ".join(text.split())
    assert "22 B for the running segment" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_a_short_last_segment_is_told() -> None:
    made = loop(steps=23)
    choice = replace(made.choice, problem=replace(made.choice.problem, segment=2, tape=20))
    coarse = replace(made, plan=replace(made.plan, choice=choice))
    assert "short last segment" in coarse.by_formula().note
    assert "short last segment" not in made.by_formula().note
