"""A program that does not give what torch gives is a ProofError at its first call; one that does changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, fx, nn

import reroll
from networks import Clip, Deciding
from reroll.backends.construct.stages import proof as proof_stage
from reroll.backends.construct.stages.proof import Proof
from reroll.backends.construct.stages.seen import rounding_of
from reroll.backends.runtime.executable import Executable
from reroll.backends.runtime.node import RecurrenceModule
from reroll.capture.interpreter import LoopInterpreter
from reroll.graph.private import saved_as_copies

STEPS = 12


class Network(nn.Module):
    """A recurrence with dropout, a counter, and a weight whose gradient is clipped at each step, if wanted."""

    calls: Tensor

    def __init__(self, clips: bool = False) -> None:
        super().__init__()
        self.weight, self.cell, self.clips = nn.Parameter(torch.randn(4, 4)), nn.GRUCell(4, 4), clips
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        h_BI, rows = torch.zeros_like(x_TBI[0]), []
        for t in range(x_TBI.shape[0]):
            weight = Clip.apply(self.weight) if self.clips else self.weight  # type: ignore[no-untyped-call]
            h_BI = nn.functional.dropout(self.cell(x_TBI[t] @ weight, h_BI), 0.1)
            rows.append(h_BI)
        return torch.stack(rows), h_BI


class Stateful(nn.Module):
    """A recurrence that is given its state."""

    def forward(self, x_TBI: Tensor, h_BI: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(x_TBI[t] + 0.5 * h_BI)
            rows.append(h_BI)
        return torch.stack(rows), h_BI


def made(clips: bool = False) -> tuple[Network, Tensor]:
    """A network and an input, in float64."""
    torch.manual_seed(0)
    return Network(clips).double(), torch.randn(STEPS, 2, 4, dtype=torch.float64, requires_grad=True)


def through(door: str, model: nn.Module, **how: Any) -> Callable[..., Any]:
    """A model through a door, by eager lowering unless said otherwise."""
    how = {"lowering": "eager", "proof": "first", **how}
    if door == "compile":
        compiled: Callable[..., Any] = reroll.compile(model, **how)
        return compiled
    torch._dynamo.reset()
    return torch.compile(model, backend="reroll", options=how)


def step(door: str, **how: Any) -> list[Any]:
    """All that a training step shows, the random numbers behind it too."""
    model, x = made()
    run = through(door, model, **how)
    torch.manual_seed(1)
    rows, last = run(x)
    (rows.square().sum() + last.sum()).backward()
    grads = [each.grad for each in (x, *model.parameters())]
    return [rows, last, *grads, model.calls, torch.rand(2), torch.tensor(random.random())]


def proofs(monkeypatch: pytest.MonkeyPatch) -> list[Proof]:
    """The proofs that are made from now on."""
    found, prove = [], Proof.prove

    def noted(proof: Proof, *args: Any) -> None:
        prove(proof, *args)
        found.append(proof)

    monkeypatch.setattr(Proof, "prove", noted)
    return found


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("budget", [None, 0.5])
def test_a_proof_changes_nothing(door: str, budget: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget what torch saves lies on a disk."""
    random.seed(0)
    expected = step(door, proof="never", memory_budget=budget)
    random.seed(0)
    found = proofs(monkeypatch)
    for before, after in zip(expected, step(door, memory_budget=budget), strict=True):
        assert torch.equal(before, after)
    (proof,) = found
    assert proof.proved is not None
    assert proof.proved.what == "values and gradients"
    assert proof.proved.error < 1e-14
    assert proof.spills is (budget is not None)


def ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the user's are moved out of their step as torch's are."""
    monkeypatch.setattr("reroll.capture.steps.step.is_torchs", lambda *_: True)


def lose_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient passes back over the middle of the sequence."""
    passed_on = Executable.passed_on
    monkeypatch.setattr(
        Executable,
        "passed_on",
        lambda self, grads, start: [None] * len(grads) if start == STEPS // 3 else passed_on(self, grads, start),
    )


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("fault", [ask_nothing, lose_a_gradient])
def test_a_fault_is_found_before_anything_is_changed(
    door: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made(clips=True)
    run, follows = through(door, model), torch.get_rng_state()
    fault(monkeypatch)
    for _ in range(2):
        with pytest.raises(reroll.ProofError, match=r"gradient of (cell\.)?\w+: .* off, .* at .*test_proof"):
            run(x)
        assert float(model.calls) == 0
        assert torch.equal(torch.get_rng_state(), follows)
        assert all(each.grad is None for each in (x, *model.parameters()))
    monkeypatch.undo()
    through(door, model)(x)[0].sum().backward()
    assert float(model.calls) == 1


def test_results_without_a_gradient_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    forward = RecurrenceModule.forward
    monkeypatch.setattr(
        RecurrenceModule, "forward", lambda self, *operands: [each.detach() for each in forward(self, *operands)]
    )
    with pytest.raises(reroll.ProofError, match=r"gradient of cell.bias_hh: 1.0e\+00 off"):  # zeros
        through("compile", model)(x)


def test_a_proof_leaves_alone_what_came_before_and_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state with a history is given; the first call's graph is still whole, and hooks are called for its gradient."""
    _, x = made()
    run, calls, found = through("compile", Stateful()), list[Tensor](), proofs(monkeypatch)
    x.register_hook(calls.append)
    _, h = run(x, torch.zeros_like(x[0]))
    rows, _ = run(x[:9], h)
    assert len(found) == 2
    rows.sum().backward()
    assert len(calls) == 1


def test_each_program_is_proved_once_or_always(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    for how, expected in (("first", 2), ("always", 3), ("never", 0)):
        with monkeypatch.context() as patch:
            found, run = proofs(patch), through("compile", model, proof=how)
            for steps in (STEPS, STEPS, 9):
                run(x[:steps])
        assert len(found) == expected


def test_without_gradients_values_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    found = proofs(monkeypatch)
    with torch.no_grad():
        through("backend", model)(x)
    through("compile", model, truncate=4)(x)
    assert [proof.proved and proof.proved.what for proof in found] == ["values", "values"]


class Cut(nn.Module):
    """A gradient reaches the second result from the first steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.rand(4))

    def forward(self, x_TBI: Tensor, start_BI: Tensor) -> tuple[Tensor, Tensor]:
        h_BI = start_BI * 0.5
        kept_I = self.start * 2
        for t, _ in enumerate(x_TBI.unbind(0)):
            last_BI = x_TBI[t - 1] if t else x_TBI[t] * 0
            h_BI = 0.9 * h_BI + 0.5 * last_BI
            kept_I = 0.5 * kept_I + 0.5 * kept_I
        return h_BI, kept_I


def test_what_a_cut_leaves_without_a_gradient_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    found, run = proofs(monkeypatch), through("compile", Cut(), truncate=4)
    h_BI, kept_I = run(torch.randn(9, 2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True))
    assert (h_BI.requires_grad, kept_I.requires_grad) == (True, False)
    assert [proof.proved and proof.proved.what for proof in found] == ["values"]


class Widened(nn.Module):
    """A loop over single precision that gives double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = torch.zeros_like(x_TBI[0], dtype=torch.float64)
        for t in range(x_TBI.shape[0]):
            h_BI = 0.9 * h_BI + self.weight(x_TBI[t])
        return h_BI


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_double_precision_of_single_is_as_exact_as_that(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounds otherwise by 1e-7 is no ProofError; what is off by 1e-3 is one."""
    x, forward = torch.randn(STEPS, 2, 4), RecurrenceModule.forward

    def off(factor: float) -> None:
        monkeypatch.setattr(RecurrenceModule, "forward", lambda *args: tuple(each * factor for each in forward(*args)))

    off(1 + 1e-7)
    through(door, Widened())(x).sum().backward()
    off(1 + 1e-3)
    with pytest.raises(reroll.ProofError, match=r"result(\[0\])?: 1\.0e-03 off"):
        through(door, Widened())(x)


@pytest.mark.parametrize(
    ("steps", "dtype", "expected"),
    [
        (1_000, torch.float32, (1e-4, 1e-4)),
        (100_000, torch.float32, (1e-4, 3e-3)),  # D2r's bias was off by 5e-4 there, and eager's own by as much
        (10_000_000, torch.float32, (1e-4, 0.02)),
        (100_000, torch.float64, (1e-10, 1e-10)),
        (100_000, torch.bfloat16, (0.02, 0.02)),
    ],
)
def test_what_many_steps_add_up_is_rounded_as_often(
    steps: int, dtype: torch.dtype, expected: tuple[float, float]
) -> None:
    step = fx.symbolic_trace(lambda value: value + 1)
    loop = Mock(autocast=(), step=step, examples=(torch.zeros(2, dtype=dtype),), steps=steps)
    assert rounding_of([loop]) == pytest.approx(expected, rel=0.01)


class Narrow(nn.Module):
    """Steps that pass their row through a shorter type: all of that is done ahead of the loop, for all rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x_TBI: Tensor, h_BI: Tensor) -> Tensor:
        rows = list[Tensor]()
        for t in range(1, x_TBI.shape[0]):
            row_BI = rows[-2] if len(rows) > 1 else x_TBI[t]
            h_BI = torch.tanh(h_BI + torch.tanh(row_BI.to(self.dtype)).to(row_BI.dtype))
            rows.append(row_BI)
        return h_BI


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_rounded_ahead_of_a_loop_is_no_fault(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Narrow(dtype)
    compiled = reroll.compile(model, lowering="eager", proof="always")
    for steps in (9, 7, 5):
        x_TBI, h_BI = (
            torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((steps, 3, 4), (3, 4))
        )
        compiled(x_TBI, h_BI).sin().sum().backward()
    assert reroll.check(compiled, x_TBI, h_BI, measure=False).equal


def test_gradients_of_one_of_several_results_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here an operand has one of zeros, rather than none, where the loss does not depend on it."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

        def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
            h_BI = g_BI = torch.zeros_like(x_TBI[0])
            for t in range(x_TBI.shape[0]):
                h_BI = torch.tanh(self.one(x_TBI[t]) + h_BI)
                g_BI = torch.tanh(self.other(x_TBI[t]) + g_BI)
            return h_BI, g_BI

    _, x = made()
    through("compile", Apart())(x)
    every = lambda self, _: {each for route in self.routes.values() for of in route.sources for each in of}  # noqa: E731
    monkeypatch.setattr(Executable, "live_operands", every)
    with pytest.raises(reroll.ProofError, match=r"other\.\w+ from the first result alone: float64 .* instead of None"):
        through("compile", Apart())(x)


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize(("value", "allowed"), [(0.3 - 1e-7, True), (0.29, False)])
def test_a_decision_may_fall_the_other_way_within_rounding(
    door: str, value: float, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first entry is the threshold, but for rounding or for more, and the program decides otherwise."""
    forward = RecurrenceModule.forward

    def otherwise(rolled: RecurrenceModule, *operands: Tensor) -> tuple[Tensor, ...]:
        found = forward(rolled, *operands)
        return (found[0] + torch.tensor([1.5, 0, 0]), *found[1:])

    monkeypatch.setattr(RecurrenceModule, "forward", otherwise)
    x_TB = torch.randn(STEPS, 3).index_fill_(1, torch.tensor([0]), value)
    model = Deciding()
    if allowed:
        through(door, model)(x_TB)
        assert model.scale.item() == 1
    else:
        with pytest.raises(reroll.ProofError, match=r"result.*: .* off"):
            through(door, model)(x_TB)


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), reroll.BudgetError("none")], ids=["memory", "budget"]
)
def test_a_call_goes_on_where_there_is_no_room_for_a_proof(
    door: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the second call is not tried again, and nothing has changed."""
    random.seed(0)
    expected, seen, tried = step(door, proof="never"), Proof.seen, list[None]()

    def short(proof: Proof, run: Any, leaves: Any, kept: Any) -> Any:
        seen(proof, run, leaves, kept)
        tried.append(None)
        raise error

    monkeypatch.setattr(Proof, "seen", short)
    random.seed(0)
    assert all(torch.equal(a, b) for a, b in zip(step(door), expected, strict=True))
    model, x = made()
    run = through(door, model)
    run(x), run(x)
    assert len(tried) == 2, "once for each model"


def test_of_many_lengths_those_with_new_segments_are_proved_and_ever_fewer_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is only explained counts as nothing."""
    run = through("compile", Stateful(), segment=4, schedule="standard", chunk=4)
    found, lengths = proofs(monkeypatch), list[int]()
    state = torch.zeros(2, 4, requires_grad=True)
    reroll.explain(run, torch.randn(8, 2, 4), state)
    for length in (12, 16, 20, 24, 28, 14, 32):
        before = len(found)
        run(torch.randn(length, 2, 4), state)
        lengths += [length] * (len(found) - before)
    assert lengths == [12, 16, 24, 14]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("door", ["compile", "backend"])
def test_autocast_rounds_inside_of_cells(door: str, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of gradients in half precision differ from those in single precision by more than that rounds."""

    class Cast(Network):
        def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                h_BI = torch.zeros_like(x_TBI[0])
                for x_BI in x_TBI.unbind(0):
                    h_BI = self.cell(x_BI, h_BI)
            return h_BI, h_BI

    run, found = through(door, Cast()), proofs(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        last, _ = run(torch.randn(200, 16, 4))
    last.square().sum().backward()
    assert [each.other for each in found] == ["torch's own gradients are rounded to half precision"]


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_calls_without_gradients_stand_for_none_that_train(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many came before: under ``no_grad``, and of a model that is frozen."""
    found = proofs(monkeypatch)
    model, x_TBI = made()
    run, x_TBI = through(door, model), x_TBI.detach()
    with torch.no_grad():
        run(x_TBI), run(x_TBI)
    model.requires_grad_(requires_grad=False)
    run(x_TBI), run(x_TBI)
    before = len(found)
    model.requires_grad_(requires_grad=True)
    run(x_TBI)[0].sum().backward()
    assert len(found) == before + 1
    assert found[-1].proved is not None
    assert found[-1].proved.what == "values and gradients"


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_noise_explains_no_nan(door: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry of a result is something else, in single precision; what torch has as NaN or infinite is equal."""

    class Root(nn.Module):
        def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
            h_BI, rows = torch.zeros_like(x_TBI[0]), []
            for x_BI in x_TBI.unbind(0):
                h_BI = torch.tanh(x_BI + 0.5 * h_BI)
                rows.append(torch.sqrt(h_BI) / (h_BI > 0))
            return torch.stack(rows), h_BI

    x_TBI = torch.randn(STEPS, 2, 4, requires_grad=True)
    found, forward = proofs(monkeypatch), RecurrenceModule.forward
    rows, _ = through(door, Root())(x_TBI)
    assert bool(rows.isnan().any())
    assert found[0].proved is not None
    assert found[0].proved.what == "values and gradients"

    def otherwise(rolled: RecurrenceModule, *operands: Tensor) -> tuple[Tensor, ...]:
        last, *rest = forward(rolled, *operands)
        return (last.clone().index_fill_(1, torch.tensor([2]), value), *rest)

    monkeypatch.setattr(RecurrenceModule, "forward", otherwise)
    with pytest.raises(reroll.ProofError, match=r"result\[1\]: .* off"):
        through(door, Root())(x_TBI)


@pytest.mark.parametrize("size", [1, 1 << 18])
def test_a_buffer_that_a_program_leaves_as_it_was_is_found(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with noise begin from what the first began from; of what is large there is no copy, and all the same."""

    class Counting(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(size, dtype=torch.float64))

        def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
            self.count += 1
            h_BI = torch.zeros_like(x_TBI[0])
            for x_BI in x_TBI.unbind(0):
                h_BI = torch.tanh(x_BI + 0.5 * h_BI)
            return h_BI, self.count[:1] * 1

    monkeypatch.setattr("reroll.capture.normal.functional._Rewriter._write_back", lambda *_: None)
    model, (_, x_TBI) = Counting(), made()
    with pytest.raises(reroll.ProofError, match=r"inputs that are changed|afterwards count"):
        through("backend", model)(x_TBI)
    assert size > 1 or float(model.count) == 0


class FastWeights(nn.Module):
    """Weights that each step reads and then updates in place, as no gradient is to pass on from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.read_in = nn.Linear(4, 4)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI, fast_BII, rows = x_TBI[0] * 0, x_TBI.new_zeros(x_TBI.shape[1], 4, 4), []
        for t in range(x_TBI.shape[0]):
            read_BI = (fast_BII @ h_BI.unsqueeze(-1)).squeeze(-1)
            h_BI = torch.tanh(self.read_in(x_TBI[t]) + read_BI)
            fast_BII = fast_BII.detach()
            fast_BII += 0.1 * h_BI.unsqueeze(-1) * h_BI.unsqueeze(-2)
            rows.append(h_BI)
        return torch.stack(rows)


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_what_torch_refuses_to_go_backward_through_is_compared_with_copies(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That torch refuses it is said; nothing else shows it."""
    model, (_, x) = FastWeights().double(), made()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
    with saved_as_copies():
        model(x).sum().backward()
    expected, model.read_in.weight.grad = model.read_in.weight.grad, None
    found = proofs(monkeypatch)
    with pytest.warns(reroll.RerollWarning, match="Plain PyTorch does not go backward through this model"):
        through(door, model)(x).sum().backward()
    torch.testing.assert_close(model.read_in.weight.grad, expected)
    (proof,) = found
    assert proof.proved is not None
    assert proof.proved.what == "values and gradients"
    assert proof.whole
    assert "gradients are those of torch where it saves copies" in proof.summary
    monkeypatch.setattr(Executable, "passed_on", lambda _, grads, __: [None] * len(grads))
    with pytest.raises(reroll.ProofError, match=r"gradient of .* off"):
        through(door, model)(x)


def leave(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk has no room for what torch saves of a whole call, and memory for a part of it."""
    plain, most = proof_stage._plain_peak, list[int]()

    def noted(built: Any) -> int:
        most.append(plain(built))
        return most[-1]

    monkeypatch.setattr(proof_stage, "free_disk", lambda _: 0)
    monkeypatch.setattr(proof_stage, "SHARE", 1)
    monkeypatch.setattr(proof_stage, "_plain_peak", noted)
    monkeypatch.setattr(proof_stage, "free_bytes", lambda _: int(max(most) * part))


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_what_a_disk_has_no_room_for_is_proved_step_by_step(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values beside the model, gradients beside the loops with checkpoints, in which random numbers are drawn twice."""
    random.seed(0)
    expected = step(door, proof="never")
    leave(0.75, monkeypatch)
    random.seed(0)
    found = proofs(monkeypatch)
    for before, after in zip(expected, step(door), strict=True):
        assert torch.equal(before, after)
    (proof,) = found
    assert proof.proved is not None
    assert (proof.proved.what, proof.proved.error < 1e-14, proof.whole) == ("values and gradients", True, False)
    assert "run step by step" in proof.summary
    lose_a_gradient(monkeypatch)
    with pytest.raises(reroll.ProofError, match=r"gradient of (cell\.)?\w+: .* off"):
        step(door)


@pytest.mark.parametrize("seen_before", [True, False])
def test_values_alone_are_proved_where_steps_have_no_room_either(
    seen_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is seen beforehand, or when memory runs out."""

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    random.seed(0)
    expected = step("compile", proof="never")
    random.seed(0)
    monkeypatch.setattr(LoopInterpreter, "run", run_out)
    leave(0.5 if seen_before else 0.75, monkeypatch)
    found = proofs(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(step("compile"), expected, strict=True))
    (proof,) = found
    assert proof.proved is not None
    assert proof.proved.what == "values"
    assert "gradients were not compared, as there is no room" in proof.summary
