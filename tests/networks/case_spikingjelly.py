"""Networks of SpikingJelly (activation_based) as its documentation writes them. T time, B batch.

In float32 a layer is an operator of the library's own, in single-step mode one a step, in multi-step mode one for all
steps; in float64 the library computes in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training import Case

neuron, layer, functional, surrogate, encoding = (
    pytest.importorskip(f"spikingjelly.activation_based.{name}")
    for name in ("neuron", "layer", "functional", "surrogate", "encoding")
)
SINGLE: dict[str, Any] = {"dtype": torch.float32, "tolerance": 3e-5}


class Rate(nn.Module):
    """The loop of the tutorials: the firing rate over T steps of a network in single-step mode."""

    def __init__(self, net: nn.Module, encoder: Any = None) -> None:
        super().__init__()
        self.net, self.encoder = net, encoder or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        fr: Any = 0.0
        for t in range(x.shape[0]):
            fr += self.net(self.encoder(x[t]))
        rate: Tensor = fr / x.shape[0]
        return rate


class Steps(nn.Module):
    """The spikes of every step, stacked."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.net(x[t]) for t in range(x.shape[0])])


def dense(node: Any, mode: str = "s", **options: Any) -> nn.Module:
    """Two spiking layers that fire often enough to learn."""
    options = {"v_threshold": 0.3, "surrogate_function": surrogate.ATan(), **options}
    net = nn.Sequential(layer.Linear(4, 6), node(**options), layer.Linear(6, 3), node(**options))
    functional.set_step_mode(net, step_mode=mode)
    return net


def convolutional(mode: str) -> nn.Module:
    """The CSNN of the tutorials, smaller."""
    options: dict[str, Any] = {"v_threshold": 0.3, "surrogate_function": surrogate.ATan()}
    net = nn.Sequential(
        layer.Conv2d(1, 2, kernel_size=3, padding=1, bias=False),
        layer.BatchNorm2d(2),
        neuron.IFNode(**options),
        layer.MaxPool2d(2, 2),
        layer.Flatten(),
        layer.Linear(8, 3, bias=False),
        neuron.LIFNode(**options),
    )
    functional.set_step_mode(net, step_mode=mode)
    return net


def flat(steps: int) -> tuple[Tensor]:
    return (torch.randn(steps, 2, 4) * 2,)


def images(steps: int) -> tuple[Tensor]:
    return (torch.randn(steps, 2, 1, 4, 4) * 2,)


def case(make: Any, loops: tuple[int, ...], inputs: Any = flat, **options: Any) -> Case:
    return Case(make, inputs, **{"loops": loops, "reset": functional.reset_net, **SINGLE, **options})


DOUBLE: dict[str, Any] = {"dtype": torch.float64, "tolerance": 1e-12}
CARRIED: dict[str, Any] = {"reset": functional.detach_net, "restart": functional.reset_net}
CASES = {
    "if": case(lambda: Rate(dense(neuron.IFNode)), (8,)),
    "lif": case(lambda: Rate(dense(neuron.LIFNode, tau=2.0)), (8,)),
    "parametric_lif": case(lambda: Rate(dense(neuron.ParametricLIFNode, init_tau=2.0)), (8,)),
    "lif_float64": case(lambda: Rate(dense(neuron.LIFNode)), (8,), **DOUBLE),
    "parametric_lif_float64": case(lambda: Steps(dense(neuron.ParametricLIFNode)), (8,), **DOUBLE),
    "soft_reset_detached": case(lambda: Steps(dense(neuron.LIFNode, v_reset=None, detach_reset=True)), (8,)),
    "poisson_encoder": case(lambda: Rate(dense(neuron.LIFNode), encoding.PoissonEncoder()), (9,)),
    "convolutional": case(lambda: Rate(convolutional("s")), (8,), images),
    "carried_over": case(lambda: Steps(dense(neuron.LIFNode)), (9,), **CARRIED),
    "if_multi_step": case(lambda: dense(neuron.IFNode, "m"), (9, 9)),
    "lif_multi_step": case(lambda: dense(neuron.LIFNode, "m", store_v_seq=True), (9, 9)),
    "parametric_lif_multi_step": case(lambda: dense(neuron.ParametricLIFNode, "m", decay_input=False), (9, 9)),
    "lif_multi_step_float64": case(lambda: dense(neuron.LIFNode, "m"), (9, 9), **DOUBLE),
    "convolutional_multi_step": case(lambda: convolutional("m"), (9, 9), images),
    "carried_over_multi_step": case(lambda: dense(neuron.LIFNode, "m"), (9, 9), **CARRIED),
}
