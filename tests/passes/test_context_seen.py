"""What a pass of one's own is told in each stage: the same of the recurrence, and all that is known by then."""

from typing import Any

import pytest

import reroll
from networks import RecurrentLIF, spikes
from reroll.backends.inductor.native_products import vectors
from reroll.program.context import Context
from reroll.program.registry import On, register_pass
from reroll.schedules.named import tree
from reroll.schedules.problem import Problem

STAGES: tuple[On, ...] = ("step", "half", "program")


@pytest.mark.usefixtures("unproved")  # eager segments are what is proved
@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_every_stage_sees_how_segments_run(lowering: str) -> None:
    seen: dict[str, list[Context]] = {stage: [] for stage in STAGES}
    stepped: list[Any] = []

    def watching(stage: On) -> None:
        @register_pass(f"see-{stage}", on=stage)
        def see(subject: Any, context: Context) -> Any:
            seen[stage].append(context)
            stepped.extend([subject] if stage == "step" else [])
            return subject

    for stage in STAGES:
        watching(stage)
    passes = (*(f"see-{stage}" for stage in STAGES), *reroll.DEFAULT_PASSES)
    options: dict[str, Any] = {"lowering": lowering, "segment": 4, "schedule": "standard", "chunk": 8, "passes": passes}
    model, x_TBI = RecurrentLIF(6, 24, 3), spikes(20, 16, 6)
    reroll.compile(model, **options)(x_TBI).sum().backward()
    assert all(seen.values())
    for context in (each for stage in STAGES for each in seen[stage]):
        assert context.lowering == lowering
        assert context.vectors == (lowering == "inductor" and vectors())
        assert context.codec == "auto"
        assert context.recurrence is not None
        assert context.recurrence.step in stepped
        assert context.root.steps == context.recurrence.steps
    assert not any(each.facts for each in seen["step"]), "nothing is traced yet"
    assert all(each.facts == seen["half"][0].facts != () for stage in ("half", "program") for each in seen[stage])
    assert all(each.root == tree("standard", Problem(each.root.steps, 4, chunk=8)) for each in seen["program"])
