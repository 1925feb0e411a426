"""A compiled segment that gives something else than the user's operations is found; rounding is not taken for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from networks import Deciding
from reroll.backends.construct.plan import Built
from reroll.backends.construct.stages.random_replay import Drawing, RandomRecord
from reroll.backends.construct.stages.trial import Trials
from reroll.backends.dynamo.entry import Graph
from reroll.backends.inductor.lower import Interpreted
from reroll.backends.runtime.executable import Compiled
from reroll.segment.joint.graph import decompositions, in_parts

aten = torch.ops.aten
STEPS, PIECE = 14, 4


class Spiking(nn.Module):
    """Neurons that fire, with a smooth gradient in place of the step's."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.back = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
        v_BN, z_BN, rows = x_TBI.new_zeros(x_TBI.shape[1], 8), x_TBI.new_zeros(x_TBI.shape[1], 8), []
        for x_BI in x_TBI.unbind(0):
            v_BN = 0.9 * v_BN * (1 - z_BN) + self.taken(x_BI) + self.back(z_BN)
            soft_BN = torch.sigmoid(v_BN)
            z_BN = (v_BN > 0.5).to(v_BN.dtype) + soft_BN - soft_BN.detach()
            rows.append(z_BN)
        return torch.stack(rows), v_BN


class Layered(nn.Module):
    """Blocks with weights of their own, which a list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(STEPS))

    def forward(self, x_BI: Tensor) -> Tensor:
        for block in self.blocks:
            x_BI = x_BI + torch.relu(block(x_BI))
        return x_BI


class Backwards(nn.Module):
    """Rows are read in turn from the end, along the second dimension, and beside them a number of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.scale = nn.GRUCell(3, 5), nn.Parameter(torch.ones(()))

    def forward(self, x_BTI: Tensor) -> tuple[Tensor, Tensor]:
        h_BN, rows = x_BTI.new_zeros(x_BTI.shape[0], 5), []
        for t in reversed(range(x_BTI.shape[1])):
            h_BN = self.cell(x_BTI[:, t] * self.scale, h_BN * (1 - 0.01 * t))
            rows.append(h_BN.cumsum(1))
        return torch.stack(rows, 1), h_BN


class Dropping(nn.Module):
    """Masks of three kinds, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.back = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN, rows = x_TBI.new_zeros(x_TBI.shape[1], 8), []
        for x_BI in x_TBI.unbind(0):
            h_BN = nn.functional.dropout(torch.tanh(self.taken(x_BI) + self.back(h_BN)), 0.3)
            h_BN = h_BN * torch.bernoulli(torch.sigmoid(h_BN)) + 0.1 * torch.randn_like(h_BN)
            h_BN = h_BN * (torch.rand_like(h_BN) < 0.8) + torch.randint(3, h_BN.shape)
            rows.append(h_BN)
        return torch.stack(rows)


class Halved(Spiking):
    """Neurons, all of it in half precision by autocast."""

    def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x_TBI)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "spiking": (Spiking, (STEPS, 2, 3)),
    "layered": (Layered, (2, 4)),
    "backwards": (Backwards, (2, STEPS, 3)),
    "random": (Dropping, (STEPS, 2, 3)),
    "autocast": (Halved, (STEPS, 2, 3)),
}
PLAIN = ("spiking", "layered", "backwards")


def trained(run: Callable[..., Any], x: Tensor) -> None:
    result = run(x)
    sum(each.sin().sum() for each in (result if isinstance(result, tuple) else (result,))).backward()


def made(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[[], None], tuple[Built, ...]]:
    """A call of a network by eager segments, and its loop."""
    torch.manual_seed(0)
    kind, sizes = CASES[name]
    torch._dynamo.reset()
    graphs = list[Graph]()

    def noted(graph: Graph, **_: object) -> str:
        graphs.append(graph)
        return ""

    monkeypatch.setattr(Graph, "more_than_plain", noted)
    how: dict[str, Any] = {
        "lowering": "eager",
        "schedule": "standard",
        "segment": PIECE,
        "chunk": PIECE,
        "proof": "never",
    }
    run, x = torch.compile(kind().to(dtype), backend="reroll", options=how), torch.randn(sizes, dtype=dtype)
    trained(run, x)
    return lambda: trained(run, x), graphs[0].built


def tried(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, changed: Callable[[Any], Any]) -> Trials:
    """What comes of trying segments of which the longest was changed, beside the right ones."""
    call, built = made(name, dtype, monkeypatch)
    others = []
    for each in built:
        compiled = each.executable.compiled
        segments = dict(compiled.segments)
        segments[max(segments)] = changed(segments[max(segments)])
        other = Compiled(segments, compiled.watch, compiled.once, compiled.graphs)
        others.append(replace(each, executable=replace(each.executable, compiled=other)))
    trials = Trials(built, others)
    call()
    trials.end()
    assert not any(each.executable.onlookers for each in built)
    return trials


def off(half: str, number: int, change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Changes one result of a half."""

    def changed(segment: Any) -> Any:
        right = getattr(segment, half)

        def wrong(inputs: list[Any]) -> list[Any]:
            found = list(getattr(right, "call", right)(inputs))
            at = [place for place, each in enumerate(found) if isinstance(each, Tensor)][number]
            found[at] = change(found[at])
            return found

        hands_over = isinstance(right, Interpreted)
        return replace(segment, **{half: replace(right, call=wrong) if hands_over else wrong})

    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("name", [*PLAIN, "random"])
def test_what_is_right_is_found_to_be(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = tried(name, dtype, monkeypatch, lambda segment: segment)
    (trial,) = trials.found.values()
    assert (trial.differs, trial.missed, trial.tried) == ("", "", {"middle", "end"})
    assert trial.error < 100 * torch.finfo(dtype).eps
    given = ", given the random numbers that they drew" if name == "random" else ""
    assert trials.summary.startswith(f"compiled segments are those of float64 on the values of a call{given}: off by ")


@pytest.mark.parametrize(
    ("half", "number", "factor"),
    [("forward", 0, 1.003), ("forward", -1, -1), ("backward", 0, 1.003), ("backward", -1, 1.003)],
    ids=["a carry", "what is saved", "a carry's gradient", "another gradient"],
)
@pytest.mark.parametrize("name", PLAIN)
def test_what_is_wrong_is_found(
    name: str, half: str, number: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one entry, in single precision."""

    def change(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return ~value
        moved = value.clone()
        moved.view(-1)[value.abs().argmax()] *= factor
        return moved

    trials = tried(name, torch.float32, monkeypatch, off(half, number, change))
    assert "compiled steps from step" in trials.differs, trials.summary


@pytest.mark.parametrize("name", ["spiking", "random", "autocast"])
@pytest.mark.parametrize(("half", "factor"), [("forward", 1), ("forward", 0.2), ("backward", 0.2)])
def test_half_precision_is_compared_with_float64(
    name: str, half: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is right is found to be, what is far off is not."""
    dtype = torch.float32 if name == "autocast" else torch.bfloat16
    trials = tried(name, dtype, monkeypatch, off(half, 0, lambda value: value * factor))
    assert bool(trials.differs) is (factor != 1), trials.summary
    (trial,) = trials.found.values()
    assert not trial.missed
    assert trial.own > 1e-3


def drawing(x: Tensor) -> tuple[Tensor, ...]:
    """Whatever compiled code draws numbers of its own for."""
    flips = nn.functional.dropout(x, 0.3), torch.bernoulli(x.sigmoid())
    return (*flips, torch.rand_like(x) + 1, torch.randn(5, 3), torch.randint(-2, 9, (40,)))


@pytest.mark.inductor
def test_numbers_of_compiled_code_are_made_again() -> None:
    x, seeds = torch.randn(64, 3), torch.empty(5, dtype=torch.int64)
    torch.manual_seed(7)
    found = torch.compile(drawing)(x)
    torch.manual_seed(7)
    drawn = RandomRecord(torch.randint(-(1 << 63), (1 << 63) - 1, seeds.shape).tolist())
    with in_parts(), Drawing(drawn) as again:
        expected = drawing(x)
    again.end()
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(before, after)
    assert not drawn.unlike


def test_a_mask_of_another_rate_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, of which too many are dropped."""
    parts = decompositions()
    other = {aten.native_dropout.default: lambda x, rate, _: parts[aten.native_dropout.default](x, rate + 0.2, True)}
    monkeypatch.setattr("reroll.backends.construct.stages.random_replay._parts", lambda: {**parts, **other})
    drawn = RandomRecord([3])
    with in_parts(), Drawing(drawn):
        nn.functional.dropout(torch.ones(1000), 0.3)
    assert drawn.unlike == "native_dropout"


def twice(drawn: RandomRecord) -> None:
    with Drawing(drawn) as drawing:
        torch.rand(4), torch.rand(4)
    drawing.end()


def test_numbers_that_were_not_drawn_cannot_be_compared() -> None:
    """Of too few seeds, of too many, of another operation."""
    for drawn in (
        RandomRecord([3]),
        RandomRecord([3, 4, 5]),
        RandomRecord([], [("rand", torch.ones(4)), ("randn", torch.ones(4))]),
    ):
        with pytest.raises(reroll.UnsupportedError, match="other random numbers"):
            twice(drawn)


def test_a_decision_within_rounding_may_fall_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the operand of a relu is a rounding away from zero, compiled code may have it on the other side."""

    def one_way(value: float, allowed: bool) -> None:
        monkeypatch.setitem(CASES, "edge", (Deciding, (STEPS, 4)))
        monkeypatch.setattr(torch, "randn", partial_randn(value))
        trials = tried("edge", torch.float32, monkeypatch, off("forward", 0, decided))
        assert (not trials.differs) is allowed

    plain = torch.randn

    def partial_randn(value: float) -> Any:
        def drawn(*args: Any, **kwargs: Any) -> Tensor:
            found = plain(*args, **kwargs)
            if found.dim() == 2 and found.shape[0] == STEPS:
                found[:, 0] = value
            return found

        return drawn

    def decided(value: Tensor) -> Tensor:
        """The other decision for the first entry, in the last step."""
        return value + torch.tensor([1.5, 0, 0, 0])

    one_way(0.3 - 1e-7, allowed=True)
    one_way(0.29, allowed=False)


@pytest.mark.parametrize("door", ["front", "backend"])
def test_wrong_code_is_an_error_at_the_first_call(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is there, and no buffer has changed."""
    from reroll.backends.inductor import lower

    lowered = lower._inductor

    def wrong(half: Any, *, backward: bool, traced: Any) -> Any:
        found = lowered(half, backward=backward, traced=traced)
        return (lambda inputs: [each if each is None else each * 1.01 for each in found(inputs)]) if backward else found

    monkeypatch.setattr(lower, "_inductor", wrong)
    model, x = Spiking(), torch.randn(STEPS, 2, 3)
    how: dict[str, Any] = {"segment": 2, "schedule": "store_all", "proof": "first"}
    run = reroll.compile(model, **how) if door == "front" else None
    with pytest.raises(reroll.ProofError, match=r"compiled segments do not give .* gradient of .*proof='never'"):
        trained(run or torch.compile(model, backend="reroll", options=how), x)
    assert all(each.grad is None for each in model.parameters())
