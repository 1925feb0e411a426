"""Where memory runs out, a cheaper plan plays the call again with the same gradients; budgets follow what is free."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from capacity import Capacity
from gru import B, Gru, H, I, T, compiled, gradients, same
from reroll.errors import RerollWarning, ShortageError, is_shortage

ALL = 1 << 40

pytestmark = pytest.mark.usefixtures("double_precision")


class Noisy(Gru):
    """Random numbers in every step, and an output of every step."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, rows = x_TBI.new_zeros(x_TBI.shape[1], H), []
        for t in range(x_TBI.shape[0]):
            h_BH = nn.functional.dropout(self.cell(x_TBI[t], h_BH), 0.3)
            rows.append(self.out(h_BH))
        return torch.stack(rows)


class There(Gru):
    """Two loops, forth and back."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.GRUCell(H, H)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, rows = x_TBI.new_zeros(x_TBI.shape[1], H), []
        for t in range(x_TBI.shape[0]):
            h_BH = self.cell(x_TBI[t], h_BH)
            rows.append(h_BH)
        h_BH = torch.zeros_like(h_BH)
        for row_BH in rows[::-1]:
            h_BH = self.back(row_BH, h_BH)
        return self.out(h_BH)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Gru, Noisy])
def test_a_cheaper_plan_plays_the_call_again(make: type[Gru]) -> None:
    model, x = make(), torch.randn(T, B, I)
    expected, fast = gradients(model, model, x), compiled(model, memory_budget=0.7)
    same(gradients(model, fast, x), expected)
    _, most = peaks(model, fast, x)
    whole = reroll.explain(fast, x).loops[0].prediction.peak
    smaller = Capacity(int(0.8 * most))
    with smaller.limiting(), pytest.warns(RerollWarning, match=r"Memory ran out in the .* is predicted to hold"):
        same(gradients(model, fast, x), expected)
    assert smaller.failed
    failures = smaller.failed
    with smaller.limiting():
        same(gradients(model, fast, x), expected)
    assert smaller.failed == failures, "the next call begins with the cheaper plan"
    assert reroll.explain(fast, x).loops[0].prediction.peak < whole


def test_loops_that_hold_memory_for_each_other() -> None:
    """The second loop cannot have what the first one holds; at the next call that one holds less."""
    model, x = There(), torch.randn(T, B, I)
    expected, fast = gradients(model, model, x), compiled(model, memory_budget=1.0)
    smaller = Capacity(int(0.6 * peaks(model, fast, x)[1]))
    with smaller.limiting(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        with pytest.raises(ShortageError, match="have cheaper plans from now on: call it again"):
            gradients(model, fast, x)
        same(gradients(model, fast, x), expected)


def peaks(model: nn.Module, call: Any, x: Tensor) -> tuple[int, int]:
    """Bytes that a forward takes, and a whole training step."""
    device = Capacity(ALL)
    model.zero_grad()
    with device.limiting():
        loss = call(x).square().mean()
        ahead = device.peak
        loss.backward()
    return ahead, device.peak


@pytest.mark.usefixtures("unproved")
def test_both_halves_start_anew() -> None:
    """Memory that runs out at any moment of a training step, whichever plan it then has."""
    model = Noisy()
    fast = compiled(model, memory_budget=1.0, segment=2)
    for steps, share in enumerate((-1.0, -0.5, 0.1, 0.5, 0.9), start=20):
        x = torch.randn(steps, B, I)
        expected, (ahead, whole) = gradients(model, model, x), peaks(model, fast, x)
        smaller = Capacity(int(ahead + share * (whole - ahead if share > 0 else ahead / 2)))
        with smaller.limiting(), pytest.warns(RerollWarning, match="Memory ran out in the") as warned:
            same(gradients(model, fast, x), expected)
        first = str(warned[0].message)
        assert ("in the backward" if share > 0 else "in the forward") in first


def test_a_run_that_is_kept_starts_anew() -> None:
    model, x = Noisy(), torch.randn(20, B, I)
    expected, fast = gradients(model, model, x), compiled(model, memory_budget=1.0, segment=2)
    smaller = Capacity(sum(peaks(model, fast, x)) // 2)
    model.zero_grad()
    torch.manual_seed(5)
    with smaller.limiting():
        loss = fast(x).square().mean()
        after = torch.get_rng_state()
        with pytest.warns(RerollWarning, match="in the backward"):
            loss.backward(retain_graph=True)
        loss.backward()
    assert torch.equal(torch.get_rng_state(), after), "a call draws its random numbers once, however often it is played"
    same({name: each.grad / 2 for name, each in model.named_parameters() if each.grad is not None}, expected)


def test_many_calls_wait_for_their_backwards() -> None:
    """Each was made by the plan of its time; that one of them does not fit says nothing of the present plan."""
    model, x = Noisy(), torch.randn(20, B, I)
    fast = compiled(model, memory_budget=1.0, segment=2)
    expected, (ahead, whole) = gradients(model, model, x), peaks(model, fast, x)
    device, losses = Capacity(ALL), []
    model.zero_grad()
    with device.limiting(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(6):
            torch.manual_seed(5)
            losses.append(fast(x).square().mean())
        for loss in losses:
            device.nbytes = device.alive + (whole - ahead) // 2
            loss.backward()
    assert device.failed == 6
    assert len(warned) == 1, "the others are played again with the plan that was found for the first"
    same({name: each.grad / 6 for name, each in model.named_parameters() if each.grad is not None}, expected)


def test_a_kept_run_that_was_refused_can_be_reversed_later() -> None:
    model, x = Noisy(), torch.randn(20, B, I)
    expected, fast = gradients(model, model, x), compiled(model, schedule="store_all", segment=2)
    model.zero_grad()
    torch.manual_seed(5)
    loss, device = fast(x).square().mean(), Capacity(0)
    with device.limiting(), pytest.raises(ShortageError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    same({name: each.grad for name, each in model.named_parameters() if each.grad is not None}, expected)


def test_carries_that_move_are_planned_anew_without_measuring(tmp_path: Path) -> None:
    """Segments are timed once, before memory is short."""
    model, x = Gru(), torch.randn(T, B, I)
    fast = compiled(model, schedule="hrevolve", remote="disk", memory_budget=0.5, spill_folder=str(tmp_path))
    expected, (_, most) = gradients(model, model, x), peaks(model, fast, x)
    smaller = Capacity(int(0.8 * most))
    with smaller.limiting(), pytest.warns(RerollWarning, match="with another, hrevolve"):
        same(gradients(model, fast, x), expected)
    assert smaller.failed


def test_what_cannot_be_had_cheaper_is_refused() -> None:
    model, x = Gru(), torch.randn(T, B, I)
    expected, fast = gradients(model, model, x), compiled(model, schedule="store_all")
    same(gradients(model, fast, x), expected)
    device = Capacity(4 * B * H * 8)
    with (
        device.limiting(),
        pytest.raises(ShortageError, match=r"none needs less.*schedule='auto' in place of 'store_all'"),
    ):
        gradients(model, fast, x)
    assert all(each.grad is None for each in model.parameters())
    late = Capacity(ALL)
    with late.limiting():
        loss = fast(x).square().mean()
        late.nbytes = late.alive
        with pytest.raises(torch.OutOfMemoryError, match="No gradient of the loop was handed on"):
            loss.backward()
    assert all(each.grad is None for each in model.cell.parameters())
    assert device.alive == 0, "nothing of a refused call is held"
    same(gradients(model, fast, x), expected)


def test_without_gradients_there_is_nothing_to_plan() -> None:
    model, x = Gru(), torch.randn(T, B, I)
    fast, device, whole = compiled(model, schedule="store_all"), Capacity(0), Capacity(ALL)
    training, _ = peaks(model, fast, x)
    with torch.no_grad():
        fast(x)
        with whole.limiting():
            fast(x)
        assert whole.peak < training / 5, "nothing is kept for a backward"
        with device.limiting(), pytest.raises(torch.OutOfMemoryError, match="would be alive"):
            fast(x)


def test_what_torch_says_of_a_shortage() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.int8)
    assert is_shortage(caught.value)
    assert is_shortage(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_shortage(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_shortage(ShortageError("none needs less"))


LIMITED = """
import resource, warnings
import torch, reroll
from reroll.backends.tiers.available import free_memory
from gru import Gru, gradients, same, compiled

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
model, x = Gru(), torch.randn(240, 4096, 3)
expected, fast = gradients(model, model, x), compiled(model, memory_budget=1.0)
gradients(model, fast, x[:8])
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (100 << 20),) * 2)
assert free_memory() <= 100 << 20
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    same(gradients(model, fast, x), expected)
print([str(each.message) for each in warned])
"""


def test_a_process_that_may_not_take_more() -> None:
    """An allocation of torch fails, and the call goes on with less."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Memory ran out in the forward" in done.stdout
    assert "is predicted to hold" in done.stdout
