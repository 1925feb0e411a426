"""The networks of ``speed.py``: a state, a step, and what is read off the last state.

Shape letters: B batch, I inputs, H neurons, O outputs, C channels, X and Y pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from network_d import Spike
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

State = tuple[Tensor, ...]


class Network(nn.Module):
    """A plain loop over ``step``; the first state is zeros of the shapes of ``sizes``, without the batch."""

    sizes: tuple[tuple[int, ...], ...]

    def step(self, x_BI: Tensor, *state: Tensor) -> State:
        """The state after one more step."""
        raise NotImplementedError

    def segment(self, x_TBI: Tensor, *state: Tensor) -> State:
        """The state after a few steps."""
        for t in range(x_TBI.shape[0]):
            state = self.step(x_TBI[t], *state)
        return state

    def initial(self, x_TBI: Tensor) -> State:
        """The state before the first step."""
        return tuple(x_TBI.new_zeros(x_TBI.shape[1], *size) for size in self.sizes)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The last tensor of the last state."""
        return self.segment(x_TBI, *self.initial(x_TBI))[-1]


class Checkpointed(nn.Module):
    """A network with ``torch.utils.checkpoint`` over segments of about sqrt(T) steps."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The network's result."""
        length = max(round(math.sqrt(x_TBI.shape[0])), 1)
        state = self.network.initial(x_TBI)
        for start in range(0, x_TBI.shape[0], length):
            part = x_TBI[start : start + length]
            state = checkpoint(self.network.segment, part, *state, use_reentrant=False)
        return state[-1]


class CompiledSegments(nn.Module):
    """A network in segments of 8 steps, each compiled by ``backend``; ``kept``: their tapes, else their carries alone.

    Without tapes segments run again under ``torch.utils.checkpoint``.
    """

    def __init__(self, network: Network, *, kept: bool = False, backend: str = "inductor") -> None:
        super().__init__()
        self.network, self.kept = network, kept
        self.segment = torch.compile(network.segment, backend=backend, dynamic=False)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The network's result."""
        state = self.network.initial(x_TBI)
        run = self.segment if self.kept else partial(checkpoint, self.segment, use_reentrant=False)
        for start in range(0, x_TBI.shape[0], 8):
            state = run(x_TBI[start : start + 8], *state)
        return state[-1]


def fired(v: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
    """Potentials and spikes of leaky neurons after one more step; a spike takes 1 off its potential."""
    v = 0.9 * v + current
    z: Tensor = Spike.apply(v - 1.0)  # type: ignore[no-untyped-call]
    return v - z, z


class Recurrent(Network):
    """Network D: a recurrent LIF layer with a readout that is summed up over time."""

    def __init__(self, gain: float, neurons: int = 256) -> None:
        super().__init__()
        self.sizes = ((neurons,), (neurons,), (10,))
        self.wi, self.wo = nn.Linear(64, neurons), nn.Linear(neurons, 10)
        self.wr = nn.Linear(neurons, neurons, bias=False)
        with torch.no_grad():
            self.wi.weight.mul_(gain)

    def step(self, x_BI: Tensor, *state: Tensor) -> State:
        """Potential, spikes, summed readout."""
        v_BH, z_BH, sum_BO = state
        v_BH = 0.9 * v_BH * (1 - z_BH) + self.wi(x_BI) + self.wr(z_BH)
        z_BH = Spike.apply(v_BH - 1.0)  # type: ignore[no-untyped-call]
        return v_BH, z_BH, sum_BO + self.wo(z_BH)


class FeedForward(Network):
    """LIF layers of 128-H-H-20 neurons, one after another in each step."""

    def __init__(self, neurons: int = 256) -> None:
        super().__init__()
        self.sizes = ((neurons,), (neurons,), (20,))
        self.first, self.second = nn.Linear(128, neurons), nn.Linear(neurons, neurons)
        self.third = nn.Linear(neurons, 20)
        with torch.no_grad():
            self.first.weight.mul_(2)
            self.second.weight.mul_(4)

    def step(self, x_BI: Tensor, *state: Tensor) -> State:
        """Two potentials, and a leaky readout."""
        u_BH, v_BH, sum_BO = state
        u_BH, y_BH = fired(u_BH, self.first(x_BI))
        v_BH, z_BH = fired(v_BH, self.second(y_BH))
        return u_BH, v_BH, 0.9 * sum_BO + self.third(z_BH)


class Single(Network):
    """One layer of leaky neurons that read as many inputs, as benchmarks of spiking libraries have it.

    Source of the size, and of the times of hand-written kernels: https://open-neuromorphic.org/p/spiking-neural-network-framework-benchmarking/
    """

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.sizes = ((neurons,), (neurons,))
        self.layer = nn.Linear(neurons, neurons)
        with torch.no_grad():
            self.layer.weight.mul_(8)

    def step(self, x_BH: Tensor, *state: Tensor) -> State:
        """Potentials, and how often each neuron has fired."""
        v_BH, sum_BH = state
        v_BH, z_BH = fired(v_BH, self.layer(x_BH))
        return v_BH, sum_BH + z_BH


class Convolutional(Network):
    """Two spiking convolutions with pooling on images of 16 by 16, and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = ((8, 16, 16), (16, 8, 8), (10,))
        self.first, self.second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.out = nn.Linear(16 * 16, 10)
        with torch.no_grad():
            self.first.weight.mul_(3)
            self.second.weight.mul_(3)

    def step(self, x_BI: Tensor, *state: Tensor) -> State:
        """Two layers of potentials, and a leaky readout."""
        u_BCXY, v_BCXY, sum_BO = state
        u_BCXY, y_BCXY = fired(u_BCXY, self.first(x_BI))
        v_BCXY, z_BCXY = fired(v_BCXY, self.second(F.avg_pool2d(y_BCXY, 2)))
        return u_BCXY, v_BCXY, 0.9 * sum_BO + self.out(F.avg_pool2d(z_BCXY, 2).flatten(1))


class Gated(Network):
    """A loop over ``nn.LSTMCell`` or ``nn.GRUCell``."""

    def __init__(self, cell: type[nn.LSTMCell] | type[nn.GRUCell], neurons: int = 256) -> None:
        super().__init__()
        self.cell: Any = cell(64, neurons)
        self.sizes = ((neurons,),) * (2 if cell is nn.LSTMCell else 1)

    def step(self, x_BI: Tensor, *state: Tensor) -> State:
        """The hidden state last."""
        if len(state) == 1:
            return (self.cell(x_BI, state[0]),)
        c_BH, h_BH = state
        h_BH, c_BH = self.cell(x_BI, (h_BH, c_BH))
        return c_BH, h_BH


class Tanh(Network):
    """A tanh RNN."""

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.sizes = ((neurons,),)
        self.wi, self.wr = nn.Linear(64, neurons), nn.Linear(neurons, neurons)

    def step(self, x_BI: Tensor, *state: Tensor) -> State:
        """The hidden state."""
        return (torch.tanh(self.wi(x_BI) + self.wr(state[0])),)


class Layer(Network):
    """``nn.LSTM`` or ``nn.GRU``: torch runs a whole segment by one call."""

    def __init__(self, layer: type[nn.LSTM] | type[nn.GRU], neurons: int = 256) -> None:
        super().__init__()
        self.layer: Any = layer(64, neurons)
        self.sizes = ((neurons,),) * (2 if layer is nn.LSTM else 1)

    def segment(self, x_TBI: Tensor, *state: Tensor) -> State:
        """The hidden state last."""
        first = [each[None] for each in reversed(state)]
        _, last = self.layer(x_TBI, tuple(first) if len(first) > 1 else first[0])
        return tuple(each[0] for each in reversed(last)) if isinstance(last, tuple) else (last[0],)


def dense(batch: int, inputs: int) -> Callable[[int], Tensor]:
    """Normal inputs of T steps."""
    return lambda steps: torch.randn(steps, batch, inputs)


def events(batch: int, *sizes: int) -> Callable[[int], Tensor]:
    """Spikes in one of ten places."""
    return lambda steps: (torch.rand(steps, batch, *sizes) < 0.1).float()


# name: (network, its inputs of T steps, the usual T)
NETWORKS: dict[str, tuple[Callable[[], Network], Callable[[int], Tensor], int]] = {
    "recurrent LIF (D2r)": (lambda: Recurrent(3.0), dense(32, 64), 1024),
    "recurrent LIF, sparse (D)": (lambda: Recurrent(1.0), dense(32, 64), 1024),
    "feed-forward LIF": (FeedForward, events(32, 128), 512),
    "convolutional spiking": (Convolutional, events(16, 2, 16, 16), 100),
    "LSTM cell": (lambda: Gated(nn.LSTMCell), dense(32, 64), 1000),
    "GRU cell": (lambda: Gated(nn.GRUCell), dense(32, 64), 1000),
    "tanh RNN, 1,024 neurons": (lambda: Tanh(1024), dense(32, 64), 256),
    "tanh RNN, 32 neurons": (lambda: Tanh(32), dense(4, 64), 2000),
}

# Other lengths of network D, and torch's own layers over time.
MORE = {
    **{
        f"{name}, T={steps:,}": (NETWORKS[name][0], NETWORKS[name][1], steps)
        for name in ("recurrent LIF (D2r)", "recurrent LIF, sparse (D)")
        for steps in (256, 4096)
    },
    "nn.LSTM": (lambda: Layer(nn.LSTM), dense(32, 64), 1000),
    "nn.GRU": (lambda: Layer(nn.GRU), dense(32, 64), 1000),
}
