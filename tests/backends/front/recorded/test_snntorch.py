"""``reroll.compile`` records snnTorch's networks where Dynamo refuses them, as on torch 2.11."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agreement import differences, results
from length_networks import H, I
from recorded_networks import twins, unread
from reroll.backends.front.recorded import Recorded

pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.filterwarnings("ignore::reroll.RerollWarning")]


def leaky_network(snn: Any) -> nn.Module:
    """Two leaky layers, as snnTorch's tutorials write them."""

    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.lif1 = nn.Linear(I, H), snn.Leaky(beta=0.9)
            self.fc2, self.lif2 = nn.Linear(H, 2), snn.Leaky(beta=0.8, learn_beta=True)

        def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
            mem1, mem2 = self.lif1.reset_mem(), unread(self.lif2.reset_mem())
            spikes, mems = [], []
            for step in range(x_TBI.shape[0]):
                spk1, mem1 = self.lif1(self.fc1(x_TBI[step]), mem1)
                spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
                spikes.append(spk2)
                mems.append(mem2)
            return torch.stack(spikes), torch.stack(mems)

    return Leaky()


def test_snntorch_trains_as_in_eager() -> None:
    snn = pytest.importorskip("snntorch")
    torch.set_default_dtype(torch.float32)  # its surrogates give float32
    net, twin, run = twins(leaky_network(snn))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (net, twin)]
    for steps in (20, 33, 20):
        x_TBI = 2 * torch.randn(steps, 3, I)
        different = differences(results(run, twin, (x_TBI,)), results(net, net, (x_TBI,)), 3e-5)
        assert not different
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():  # from weights that differ by rounding, spikes soon differ
            for mine, theirs in zip(twin.parameters(), net.parameters(), strict=True):
                mine.copy_(theirs)
    assert isinstance(run.reroll_caller.front.traced, Recorded)
