"""``reroll.compile`` records snnTorch's networks where Dynamo refuses them, as on torch 2.11."""

from __future__ import annotations

import pytest
import torch

from agreement import differences, results
from length_networks import H, I
from recorded_networks import leaky_network, twins, unread

pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.filterwarnings("ignore::reroll.RerollWarning")]


def test_snntorch_trains_as_in_eager() -> None:
    snn = pytest.importorskip("snntorch")
    torch.set_default_dtype(torch.float32)  # its surrogates give float32
    net, twin, run = twins(leaky_network(snn, I, H, unread))
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
    assert not run.reroll_caller.is_read
