"""Threads and cores: kernels and loops use no more threads than this process has cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.inductor.wrapper_codegen.threads import cores, kernel_threads, no_more_threads_than_cores
from reroll.backends.runtime.node import RecurrenceModule

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not pin processes")


@pytest.fixture(autouse=True)
def threads_put_back() -> Iterator[None]:
    threads, affinity = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, affinity)
    torch.set_num_threads(threads)


def test_kernels_are_written_for_no_more_threads_than_cores() -> None:
    torch.set_num_threads(cores() + 3)
    assert kernel_threads() == cores()
    torch.set_num_threads(1)
    assert kernel_threads() == 1
    with torch._inductor.config.patch({"cpp.threads": cores() + 5}):
        assert kernel_threads() == cores() + 5


def test_a_process_on_one_core_has_one() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    assert cores() == 1


def test_the_number_of_threads_comes_back() -> None:
    many = cores() + 2
    torch.set_num_threads(many)
    with no_more_threads_than_cores():
        assert torch.get_num_threads() == cores()
    assert torch.get_num_threads() == many
    torch.set_num_threads(1)
    with no_more_threads_than_cores():
        assert torch.get_num_threads() == 1


class Counted(nn.Module):
    """A tanh network with rows enough for kernels to be split."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wr = nn.Linear(32, 160), nn.Linear(160, 160)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], 160)
        for t in range(x_TBI.shape[0]):
            h_BH = torch.tanh(self.wi(x_TBI[t]) + self.wr(h_BH))
        return h_BH


@pytest.mark.parametrize("threads", [2, 4])
def test_gradients_with_several_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Counted(), torch.randn(24, 64, 32)
    torch.set_num_threads(threads)
    seen = list[int]()
    played = RecurrenceModule.played

    def watched(*given: Any) -> Any:
        seen.append(torch.get_num_threads())
        return played(*given)

    monkeypatch.setattr(RecurrenceModule, "played", watched)
    fast = reroll.compile(model, schedule="standard", segment=4)
    found = torch.autograd.grad(fast(x).square().mean(), list(model.parameters()))
    assert torch.get_num_threads() == threads
    assert set(seen) == {min(threads, cores())}
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for made, right in zip(found, expected, strict=True):
        torch.testing.assert_close(made, right, rtol=1e-4, atol=1e-6)
