"""What is kept where products are replayed: spikes in bits, or the rows of products, and no more."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from captured import captured
from halves import BOTH, CONTEXT, B, H, N, kinds
from networks import RecurrentLIF, Spike, spikes
from reroll.backends.inductor.lower import _cut, _halves, cut_both_ways, prepare
from reroll.program.registry import run_on_half
from reroll.segment.trace import Traced, trace


def segment(model: Any, x: Tensor, steps: int) -> Traced:
    found = trace(captured(model.float(), x.float()), steps, decompose=True)
    prepare(found, "inductor")
    return found


def test_spikes_are_replayed_in_products_of_the_whole_segment() -> None:
    found = segment(RecurrentLIF(8, 32, 3), spikes(24, 4, 8), 8)
    assert cut_both_ways(found, "inductor", "auto")
    cut = _cut(found, pack=True, replay=True)
    assert cut.kept <= 4 * (8 * 32 / 8 + 32 * 4 + 3 * 4)  # spikes of eight steps in bits, and the carry
    _, backward, _ = _halves(found, pack=True, replay=True)
    assert backward is not None
    left = kinds(run_on_half(BOTH, backward, CONTEXT).graph)
    merged, sequential = 3, 7  # gradients of three weights; gradients through the recurrent weight, of a carry each
    assert left["mm"] + left["addmm"] <= merged + sequential + 1 + 3


class TwoPopulations(torch.nn.Module):
    """Excitatory and inhibitory neurons, each driven by the spikes of both, one step and three steps ago."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.states, self.late = (
            torch.nn.Linear(N, 2 * H),
            torch.nn.Linear(2 * H, 2 * H),
            torch.nn.Linear(H, H),
        )

    def forward(self, x_TBI: Tensor) -> Tensor:
        v_BN = x_TBI.new_zeros(x_TBI.shape[1], 2 * H)
        z_BN, past = v_BN, [v_BN[:, :H]] * 3
        for t in range(x_TBI.shape[0]):
            delayed_BH = self.late(past[-3])
            v_BN = 0.8 * v_BN * (1 - z_BN) + self.inputs(x_TBI[t]) + self.states(z_BN) - F.pad(delayed_BH, (0, H))
            z_BN = Spike.apply(v_BN - 0.3)  # type: ignore[no-untyped-call]
            past = [*past[1:], z_BN[:, H:]]
        return v_BN


def test_the_cut_exists_for_networks_it_was_not_made_for() -> None:
    found = segment(TwoPopulations(), torch.randn(24, B, N), 8)
    cut = _cut(found, pack=True, replay=True)
    assert cut.kept <= 0.1 * cut.plain
    gru = segment(Cell(), torch.randn(24, B, N), 8)
    assert not cut_both_ways(gru, "inductor", "auto")
    least = _cut(gru, pack=True, replay=True)
    assert 7 * B * H * 4 <= least.kept <= 8 * B * H * 4  # a state a step: the rows of the products
    layers = _cut(segment(Layers(), torch.randn(24, B, N), 8), pack=True, replay=True)
    assert layers.kept <= B * H * 4  # what is outside of the cycle is made again, products and all


class Layers(torch.nn.Module):
    """Two layers without a state, and a leaky sum whose derivative depends on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(N, H), torch.nn.Linear(H, H)

    def forward(self, x_TBI: Tensor) -> Tensor:
        v_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
        for t in range(x_TBI.shape[0]):
            v_BH = torch.tanh(0.9 * v_BH + self.second(torch.tanh(self.first(x_TBI[t]))))
        return v_BH


class Cell(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(N, H)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
        for t in range(x_TBI.shape[0]):
            h_BH = self.cell(x_TBI[t], h_BH)
        return h_BH
