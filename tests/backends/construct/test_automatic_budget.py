"""``memory_budget="auto"``: the budget follows what is free, and kernels are not compiled again for it."""

from __future__ import annotations

import pytest
import torch

import reroll
from gru import B, Gru, I, T, compiled, gradients, same, schedule_of
from reroll.backends.construct import build as fitting
from reroll.backends.construct import kernels
from reroll.backends.tiers import available
from reroll.errors import BudgetError, OptionError

pytestmark = pytest.mark.usefixtures("double_precision")


def test_a_budget_follows_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 30]
    monkeypatch.setattr(fitting, "free_bytes", lambda device: free[0])
    model, x = Gru(), torch.randn(T, B, I)
    expected, fast = gradients(model, model, x), compiled(model, memory_budget="auto")
    same(gradients(model, fast, x), expected)
    assert schedule_of(fast, x) == "store_all"
    monkeypatch.setattr(kernels, "compile_kernels", None)  # kernels are not compiled again

    def peak_at(nbytes: int) -> int:
        free[0] = nbytes
        same(gradients(model, fast, x), expected)
        return reroll.explain(fast, x).predicted_peak

    least = 20_000
    small = peak_at(least)
    assert small <= 0.8 * least
    assert schedule_of(fast, x) == "revolve"
    assert peak_at(int(1.4 * least)) == small, "a little more makes no other plan"
    assert small < peak_at(2 * least) <= 1.6 * least
    assert peak_at(1 << 30) > 1.6 * least
    assert schedule_of(fast, x) == "store_all"
    free[0] = 1_000
    with pytest.raises(BudgetError, match=r"memory_budget='auto' \(800 bytes\) is below the least .* Free memory"):
        fast(x)
    assert peak_at(least) == small


def test_without_gradients_no_budget_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "free_bytes", lambda device: 1_000)
    model, x = Gru(), torch.randn(T, B, I)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, memory_budget="auto")(x), model(x))


def test_a_budget_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "free_bytes", lambda device: None)
    with pytest.raises(OptionError, match="this system does not say"):
        compiled(Gru(), memory_budget="auto")(torch.randn(T, B, I))


def test_what_is_free_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000, 9_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 600)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 250)
    assert available.free_bytes(torch.device("cuda", 0)) == 1_350, "torch's own pool counts"
    assert available.total_bytes(torch.device("cuda", 0)) == 9_000
