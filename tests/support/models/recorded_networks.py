"""Models that Dynamo refuses, for tests of their recording: ``unread`` is a function that it is told not to read."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import reroll
from agreement import differences, results
from length_networks import EAGER, H, I
from networks_zoo import spike


@torch.compiler.disable  # type: ignore[untyped-decorator]
def unread(value: Any) -> Any:
    return value


def refused_by_dynamo(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda net, *args, **kwargs: body(unread(net), *args, **kwargs)


def leaky_network(snn: Any, inputs: int, neurons: int, read: Callable[[Any], Any] = lambda state: state) -> nn.Module:
    """Two leaky layers, as snnTorch's tutorials write them; a first state is what ``read`` makes of it."""

    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.lif1 = nn.Linear(inputs, neurons), snn.Leaky(beta=0.9)
            self.fc2, self.lif2 = nn.Linear(neurons, 2), snn.Leaky(beta=0.8, learn_beta=True)

        def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
            mem1, mem2 = self.lif1.reset_mem(), read(self.lif2.reset_mem())
            spikes, mems = [], []
            for step in range(x_TBI.shape[0]):
                spk1, mem1 = self.lif1(self.fc1(x_TBI[step]), mem1)
                spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
                spikes.append(spk2)
                mems.append(mem2)
            return torch.stack(spikes), torch.stack(mems)

    return Leaky()


class Stateful(nn.Module):
    """A leaky layer that keeps its state from call to call, as snnTorch's and SpikingJelly's do."""

    def __init__(self, update: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.fc, self.out, self.drop = nn.Linear(I, H), nn.Linear(H, 2), nn.Dropout(0.4)
        self.norm = nn.BatchNorm1d(H)
        self.decay, self.mem, self.seen, self.update = 0.8, torch.zeros(0), 0, update
        self.past: deque[Tensor] = deque([torch.zeros(1), torch.zeros(1)], maxlen=2)

    def forward(self, x_TBI: Tensor) -> Any:
        if self.mem.shape != (x_TBI.shape[1], H):
            self.mem = x_TBI.new_zeros(x_TBI.shape[1], H)
        rows = []
        for x_BI in x_TBI:
            self.step(x_BI)
            if self.update is not None:
                self.update(self)
            rows.append(self.out(self.mem))
        return torch.stack(rows)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, x_BI: Tensor) -> None:
        z_BH = spike(self.mem - 0.5)
        self.mem = self.decay * self.mem * (1 - z_BH) + self.drop(self.fc(x_BI))


def twins(net: nn.Module, **options: Any) -> tuple[Any, Any, Any]:
    twin = copy.deepcopy(net)
    return net, twin, reroll.compile(twin, **{**EAGER, **options})


def agree(net: nn.Module, twin: nn.Module, run: Any, *inputs: Any, recorded: bool = True) -> None:
    """Results, gradients, buffers and random numbers are equal; ``recorded``: whether by a record, or by Dynamo."""
    leaves = tuple(each.detach() if isinstance(each, Tensor) else each for each in inputs)
    different = differences(results(run, twin, leaves), results(net, net, leaves), 1e-12)
    assert not different, f"at {inputs[0].shape[0]} steps: {different}"
    assert run.reroll_caller.is_read is not recorded


def read_by_dynamo(net: nn.Module, *calls: Any, **options: Any) -> Any:
    """A model that no record tells, compiled: right from its first call on. Each call has one input, or a tuple."""
    net, twin, run = twins(net, **options)
    for inputs in calls:
        agree(net, twin, run, *(inputs if isinstance(inputs, tuple) else (inputs,)), recorded=False)
    return run


def detach(net: Any, twin: Any) -> None:
    net.mem, twin.mem = net.mem.detach(), twin.mem.detach()


def named(tensors: Any) -> dict[str, Tensor]:
    return {str(index): tensor for index, tensor in enumerate(tensors) if tensor is not None}


def recordings(run: Any) -> int:
    return len(run.reroll_caller.at_length.recorded.recordings)


def scaled(net: Any) -> None:
    """Python is shown a value."""
    net.mem = net.mem * float(net.mem.sum())
