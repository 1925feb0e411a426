"""Inductor segments: right gradients, and bit-identical decisions at small batches and odd widths."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from captured import captured
from networks import RecurrentLIF, spikes
from pairs import compiled
from reroll.backends.construct.build import build
from reroll.backends.inductor.lower import _halves
from reroll.backends.runtime.replay_check import Witness
from reroll.backends.runtime.values import Carry, Kept
from reroll.errors import CompilerMissingError, ReplayMismatchError
from reroll.planning.options import Options
from reroll.segment.trace import trace

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


class Mixed(nn.Module):
    """Products, transcendental functions, a reset by mask, a counter and outputs of every step, odd widths."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.states = nn.Linear(5, 7), nn.Linear(7, 7)

    def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], 7)
        count_B, ys = torch.zeros(x_TBI.shape[1], dtype=torch.int64), []
        for t in range(x_TBI.shape[0]):
            h_BH = torch.tanh(self.inputs(x_TBI[t]) + self.states(h_BH)) * torch.sigmoid(h_BH)
            fired_BH = h_BH > 0.2
            h_BH = h_BH.masked_fill(fired_BH, 0.1)
            count_B = count_B + fired_BH.sum(-1)
            ys.append(h_BH.exp())
        return torch.stack(ys), count_B


def gradients(call: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    outputs = call(x)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    first.square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@needs_compiler
@pytest.mark.parametrize(("batch", "steps"), [(1, 18), (2, 18), (3, 20)])  # the last with a shorter segment at its end
def test_inductor_equals_eager_and_replays_bit_for_bit(batch: int, steps: int) -> None:
    plain = Mixed()
    twin = copy.deepcopy(plain)
    options = {"schedule": "double", "chunk": 8, "slots": 2, "segment": 3, "verify": True, "remote": "disk"}
    fast = compiled(twin, **options)
    x = torch.randn(steps, batch, 5)
    for expected, actual in zip(gradients(plain, plain, x), gradients(fast, twin, x), strict=True):
        assert float((actual - expected).abs().max()) <= 2e-5 * float(expected.abs().max())
    assert torch.equal(fast(x)[1], plain(x)[1])


@needs_compiler
def test_inductor_keeps_random_numbers_in_recomputation() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x_TBI: Tensor) -> Tensor:
            total_BI = torch.zeros_like(x_TBI[0])
            for t in range(x_TBI.shape[0]):
                total_BI = total_BI + nn.functional.dropout(x_TBI[t] * self.scale, 0.5)
            return total_BI

    model = Noisy()
    options: dict[str, Any] = {"chunk": 4, "segment": 2, "verify": True, "on_no_recurrence": "error"}
    fast: Any = torch.compile(model, backend="reroll", options=options)
    x = torch.rand(14, 3, 6) + 0.5
    total = fast(x)
    total.sum().backward()
    assert model.scale.grad is not None
    assert torch.allclose(model.scale.grad, total.detach().sum(0))  # the same masks, or these would differ
    assert not torch.equal(fast(x), total)


class Around(nn.Module):
    """Most of the work is before and after the loop: those parts are compiled too.

    Both sum over time, so that they cannot be done in the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.cell, self.decode = nn.Linear(6, 32), nn.GRUCell(32, 5), nn.Linear(5, 32)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x_TBI: Tensor) -> Tensor:
        self.seen += 1
        coded = torch.relu(self.encode(x_TBI)).cumsum(0)
        h_BH, states = x_TBI.new_zeros(x_TBI.shape[1], 5), []
        for t in range(coded.shape[0]):
            h_BH = self.cell(coded[t], h_BH)
            states.append(h_BH)
        return torch.relu(self.decode(torch.stack(states).cumsum(0))) * self.seen


@needs_compiler
def test_what_is_around_the_loop_is_compiled_where_it_is_large() -> None:
    from reroll.backends.dynamo import outer_compile

    compiled: list[Any] = []
    original = outer_compile._compiled

    def noted(piece: Any) -> Any:
        compiled.append(piece)
        return original(piece)

    plain = Around()
    twin, x = copy.deepcopy(plain), torch.randn(12, 2, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer_compile, "_compiled", noted)
        fast: Any = torch.compile(twin, backend="reroll", options={"segment": 2, "on_no_recurrence": "error"})
        actual = gradients(fast, twin, x)
    for expected, found in zip(gradients(plain, plain, x), actual, strict=True):
        assert float((found - expected).abs().max()) <= 2e-5 * float(expected.abs().max())
    assert len(compiled) == 2
    assert float(twin.seen) == 1.0


def test_spikes_are_kept_in_bits_and_the_tape_is_small() -> None:
    recurrence = captured(RecurrentLIF(8, 32, 3), spikes(10, 4, 8))
    state, bools = 4 * 32 * 4, 4 * 32  # bytes of one float32 state, and of its spikes as bools
    eager = build(recurrence, Options(lowering="eager", segment=8)).demand.needs.segments[8].saved
    assert eager <= 8 * (state + bools) + state
    forward, _, _ = _halves(trace(recurrence, 8, decompose=True), pack=True, replay=False)
    results: Any = forward.graph.output_node().args[0]
    words = [node.meta["val"] for node in results if node.meta["val"].dtype is torch.uint8]
    assert [word.numel() for word in words] == [4 * 32]  # eight steps in the bits of one byte


def test_facts_of_the_carry_of_a_spiking_step() -> None:
    recurrence = captured(Mixed(), torch.randn(8, 2, 5))
    facts = trace(recurrence, 2, decompose=False).facts
    assert len(facts) == len(recurrence.carries)


def test_verify_names_the_step_and_value_that_differ() -> None:
    recurrence = captured(RecurrentLIF(8, 32, 3), spikes(10, 4, 8))
    witness = Witness(recurrence)
    carry = [torch.zeros(3) for _ in recurrence.carries]
    witness.see(4, carry)
    witness.see(4, carry)
    carry[0] = carry[0] - 0.0 * 1
    witness.see(4, carry)
    with pytest.raises(ReplayMismatchError, match=rf"step 4 .*{recurrence.carries[0]}"):
        witness.see(4, [carry[0] * -1.0, *carry[1:]])


def test_a_changed_replay_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = RecurrentLIF(8, 32, 3), spikes(15, 4, 8)
    options: dict[str, Any] = {"lowering": "eager", "chunk": 6, "segment": 2, "verify": True, "codec": "none"}
    fast: Any = torch.compile(model, backend="reroll", options=options)
    loss = fast(x).sum()
    original = Kept.carry

    def nudged(self: Kept) -> Carry:
        carry = original(self)
        return Carry(tuple(tensor + 1e-3 for tensor in carry.tensors), carry.random)

    monkeypatch.setattr(Kept, "carry", nudged)
    with pytest.raises(ReplayMismatchError):
        loss.backward()


def test_without_a_compiler_the_error_names_eager() -> None:
    from torch._inductor import config

    recurrence = captured(RecurrentLIF(8, 32, 3), spikes(10, 4, 8))
    with (
        config.patch({"cpp.cxx": (None, "/nowhere/g++")}),
        pytest.raises(CompilerMissingError, match='lowering="eager"'),
    ):
        build(recurrence, Options())


class Turned(nn.Module):
    """Inductor lays out what a transposed convolution reads, and the backward reads it too, as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.out = nn.Conv2d(4, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x_TBCXY: Tensor) -> Tensor:
        h_BCXY, ys = torch.zeros_like(x_TBCXY[0]), []
        for t in range(x_TBCXY.shape[0]):
            h_BCXY = torch.tanh(self.state(h_BCXY) + x_TBCXY[t])
            ys.append(self.out(h_BCXY))
        return torch.stack(ys)


@needs_compiler
def test_what_is_kept_is_laid_out_as_the_backward_reads_it() -> None:
    plain = Turned()
    twin, x = copy.deepcopy(plain), torch.randn(9, 2, 4, 5, 5)
    fast: Any = torch.compile(twin, backend="reroll", options={"segment": 3, "schedule": "store_all"})
    for found, expected in zip(gradients(fast, twin, x), gradients(plain, plain, x), strict=True):
        assert float((found - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


def test_pooling_is_traced_where_inductor_was_not_loaded_before() -> None:
    code = (
        "import torch, reroll; from torch.nn.functional import max_pool2d\n"
        "from reroll.segment.joint.graph import decompositions\n"
        "from torch.fx.experimental.proxy_tensor import make_fx\n"
        "x = torch.rand(1, 2, 8, 8, requires_grad=True)\n"
        "make_fx(lambda x: torch.autograd.grad(max_pool2d(x, 2).sum(), x), decomposition_table=decompositions())(x)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_what_inductor_rewrites_by_tracing_is_traced_apart_from_dynamo() -> None:
    """The gradient of a running product has a scatter that inductor traces anew, beside Dynamo's fake tensors."""

    def loop(x: Tensor, w: Tensor) -> Tensor:
        h = x.new_zeros(3, 4)
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] @ w + h.cumprod(1))
        return h

    torch.manual_seed(0)
    x, w = torch.randn(7, 3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64)
    reroll.check(torch.compile(loop, backend="reroll"), x, w.requires_grad_(), strict=True, measure=False)


@needs_compiler
@pytest.mark.parametrize("leaf", [False, True])
def test_a_step_that_no_gradient_goes_through_gives_its_rows(leaf: bool) -> None:
    """It has nothing to cut, and two results: inductor is given the graph as it was traced."""

    def held(x_TBH: Tensor, v_BH: Tensor) -> Tensor:
        rows = []
        for x_BH in x_TBH.unbind(0):
            v_BH = torch.where(x_BH > 0, v_BH, 0.5 * v_BH)
            rows.append(v_BH)
        return torch.stack(rows)

    inputs = torch.randn(9, 3, 4).requires_grad_(leaf), torch.ones(3, 4)
    assert torch.equal(torch.compile(held, backend="reroll")(*inputs), held(*inputs))
