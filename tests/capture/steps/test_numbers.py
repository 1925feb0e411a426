"""Numbers of a step that become inputs of it: which may, and that what the step gives is the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from reroll.backends.construct.kernels import content
from reroll.capture.steps.numbers import lifted, movable
from reroll.recurrence import Numbers, Recurrence

Step = Callable[[Any], Any]
ARITHMETIC: dict[str, Step] = {
    "sum": lambda h: h + 0.3,
    "from it": lambda h: 0.3 - h,
    "off it": lambda h: torch.sub(h, 0.3),
    "product": lambda h: h.mul(0.3),
    "by it": lambda h: h / 7,
    "it by": lambda h: 7 / h,
    "compared": lambda h: (h > 0.3) * 0.7,
    "whole": lambda h: h * 3,
    "power": lambda h: 0.3**h,
    "filled": lambda h: torch.full_like(h, 0.3) * h,
    "twice": lambda h: h * 0.3 + h * 0.3,
}
KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


def recurrence(function: Step, h: Tensor) -> Recurrence:
    """Three steps that carry h."""
    step = fx.symbolic_trace(function)

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            n.meta["example_value"] = super().run_node(n)
            return n.meta["example_value"]

    Noting(step).run(h)
    return Recurrence("loop", step, 3, ("h",), (), (), (), (h,))


def of_kind(kind: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    h = torch.linspace(0.2, 3.7, 12).reshape(sizes) if sizes else torch.tensor(1.7)
    return (h > 1).to(kind) if kind == torch.bool else h.to(kind) + (0 if kind.is_floating_point else 1)


@pytest.mark.parametrize("sizes", [(3, 4), ()])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_step_gives_the_same_with_inputs(name: str, kind: torch.dtype, sizes: tuple[int, ...]) -> None:
    h = of_kind(kind, sizes)
    if kind == torch.bool and name in ("from it", "off it"):
        pytest.skip("torch subtracts no truth values")
    loop = recurrence(ARITHMETIC[name], h)
    places = movable(loop.step)
    tables = [Numbers((each.value,)) for each in places]
    step = lifted(loop, places, [each.dtype for each in tables])
    step.graph.lint()
    numbers = [torch.tensor(each.values[0], dtype=each.dtype) for each in tables]
    expected, found = loop.step(h), step(h, *numbers)
    assert expected.dtype == found.dtype
    assert torch.equal(expected, found)
    assert not sizes or bool(places) == (name != "power" or kind not in (torch.float16, torch.bfloat16))


def test_a_number_that_would_be_rounded_twice_stays() -> None:
    torch.set_default_dtype(torch.float16)
    try:
        assert movable(recurrence(lambda h: h * 0.3, torch.arange(3)).step) == []
        assert len(movable(recurrence(lambda h: h * 0.3, torch.rand(3)).step)) == 1
    finally:
        torch.set_default_dtype(torch.float32)


def test_steps_are_equal_but_for_their_numbers() -> None:
    h = torch.randn(3)

    def text(function: Step) -> Any:
        step = recurrence(function, h).step
        return content(step, movable(step))

    assert text(lambda h: h * 0.3 + 2) == text(lambda h: h * 0.7 + 3)
    assert text(lambda h: h * 0.3 + 2) != text(lambda h: h * 0.3 + 2.0)
    assert text(lambda h: h * 0.3 + 2) != text(lambda h: h * 0.3 - 2)
    assert text(lambda h: h.sum(0)) != text(lambda h: h.sum(-1))


NOT: dict[str, Step] = {
    "a dimension": lambda h: h.sum(1),
    "a size": lambda h: h.reshape(6, 2),
    "an index": lambda h: h[2],
    "a part": lambda h: torch.narrow(h, 0, 1, 2),
    "places": lambda h: h.roll(1, 0),
    "a slope": lambda h: torch.nn.functional.leaky_relu(h, 0.3),
    "a square": lambda h: h**2,
    "a root": lambda h: h**0.5,
    "filled in another order": lambda h: torch.full_like(h.t(), 0.3),
    "a truth value": lambda h: h * True,
    "more than torch has": lambda h: h * (1 << 63),
}


@pytest.mark.parametrize("name", NOT)
def test_what_is_no_number_of_arithmetic_stays(name: str) -> None:
    assert movable(recurrence(NOT[name], torch.rand(3, 4)).step) == []
