"""The contenders of ``card.py`` that run in its process, each as a training step.

Shape letters: T steps, B batch, I inputs, H neurons, O outputs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from card_points import CHECKPOINTED_SEGMENTS, CUDNN, NETWORKS, OURS, SEGMENTS, SPIKINGJELLY, TWIN, Point
from contenders import CHECKPOINT, EAGER
from measuring import Step, training_step
from speed_networks import Checkpointed, CompiledSegments, FeedForward, Gated, Network, Single
from study_points import Contender, Shared
from torch import Tensor, nn

from reroll.report.report import Report


class AbsentError(Exception):
    """What would be compared with is not on this machine."""


@dataclass(frozen=True)
class Entrant:
    """A training step, the module whose parameters get the gradients, and the report of one of reroll's own.

    The parameters are in the order of those of the plain network.
    """

    step: Step
    network: nn.Module
    report: Callable[[], Report] | None = None


class LstmLayer(nn.Module):
    """``nn.LSTM``, cuDNN's on a card, with the weights of a loop over ``nn.LSTMCell``."""

    def __init__(self, network: Gated) -> None:
        super().__init__()
        cell = network.cell
        self.layer = nn.LSTM(cell.input_size, cell.hidden_size, device=cell.weight_ih.device)
        with torch.no_grad():
            for own, given in zip(self.layer.parameters(), network.parameters(), strict=True):
                own.copy_(given)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The last hidden state, (B, H)."""
        h_1BH: Tensor = self.layer(x_TBI)[1][0]
        return h_1BH[0]


class SpikingJelly(nn.Module):
    """A spiking network layer by layer, its neurons as SpikingJelly's multi-step LIF; the same parameters.

    A potential decays by 0.9 (tau = 10), a spike takes 1 off it, and the surrogate is that of ``network_d.Spike``.
    """

    def __init__(self, network: FeedForward | Single) -> None:
        super().__init__()
        self.network = network
        self.functional = importlib.import_module("spikingjelly.activation_based.functional")
        surrogates = importlib.import_module("spikingjelly.activation_based.surrogate")
        self.surrogate = surrogates.ATan(alpha=2.0)

    def fired(self, current_TBH: Tensor) -> Tensor:
        """The spikes of a layer, (T, B, H)."""
        v_BH = torch.zeros_like(current_TBH[0])
        spikes_TBH: Tensor = self.functional.lif_multi_step(
            current_TBH, v_BH, 10.0, decay_input=False, v_reset=None, surrogate_function=self.surrogate
        )[0]
        return spikes_TBH

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The leaky readout of the feed-forward network, (B, O), or how often each neuron of the other has fired."""
        if isinstance(self.network, Single):
            return self.fired(self.network.layer(x_TBI)).sum(0)
        y_TBH = self.fired(self.network.first(x_TBI))
        z_TBH = self.fired(self.network.second(y_TBH))
        ages_T = torch.arange(x_TBI.shape[0] - 1, -1, -1, device=x_TBI.device)
        return torch.einsum("t,tbo->bo", 0.9**ages_T, self.network.third(z_TBH))


def entrant(name: str, point: Point, x: Tensor) -> Entrant:
    """A contender by its name. Raises AbsentError with the reason where it is not on this machine."""
    network = network_of(point, x.device)
    if name in OURS:
        found = _ours(name, point, x)
        return Entrant(found, network, found.report)
    model = _MODELS[name](network, point, x.device)
    own = model if name == CUDNN else network
    return Entrant(training_step(model, own, x), own)


def network_of(point: Point, device: torch.device) -> Network:
    """The network of a point; the same one for all lengths."""
    return _network(point.network, point.neurons, device)


@cache
def _network(kind: str, neurons: int, device: torch.device) -> Network:
    torch.manual_seed(0)
    return NETWORKS[kind][0](neurons).to(device)


def _ours(name: str, point: Point, x: Tensor) -> Contender:
    """A step of reroll's. Segments are compiled once for all schedules and lengths of a network."""
    options: Mapping[str, Any] = {**OURS[name], "lowering": point.lowering}
    if name == TWIN:
        planned = _ours("double (host)", point, x).report().loops[0].choice.problem
        options = {**options, "chunk": planned.chunk, "slots": planned.slots}
    replay = "auto" if name == "auto" else False
    return Contender(_shared(network_of(point, x.device), replay, point.lowering), options, x)


@cache
def _shared(network: Network, replay: bool | str, lowering: str) -> Shared:
    return Shared(network, replay, lowering)


def _segments(network: Network, point: Point, *, kept: bool) -> nn.Module:
    return CompiledSegments(network, kept=kept, backend=point.lowering)


def _lstm(network: Network) -> nn.Module:
    assert isinstance(network, Gated)
    return LstmLayer(network)


def _spikingjelly(network: Network, device: torch.device) -> nn.Module:
    if device.type != "cuda":
        raise AbsentError("SpikingJelly's Triton kernels need a CUDA device.")
    os.environ["SJ_LIF_CUDA_IMPLEMENTATION"] = "triton"  # read when the module is imported
    try:
        assert isinstance(network, FeedForward | Single)
        model = SpikingJelly(network)
        found = model.functional.neuron_implementation("lif", device)
    except ImportError as error:
        raise AbsentError(f"SpikingJelly is not installed ({error}).") from error
    if found["implementation"] != "triton":
        raise AbsentError(f"SpikingJelly has no Triton kernels here: {found}.")
    return model


_MODELS: Mapping[str, Callable[[Network, Point, torch.device], nn.Module]] = {
    EAGER: lambda network, point, device: network,
    CHECKPOINT: lambda network, point, device: Checkpointed(network),
    SEGMENTS: lambda network, point, device: _segments(network, point, kept=True),
    CHECKPOINTED_SEGMENTS: lambda network, point, device: _segments(network, point, kept=False),
    CUDNN: lambda network, point, device: _lstm(network),
    SPIKINGJELLY: lambda network, point, device: _spikingjelly(network, device),
}
