"""A recurrent spiking network in plain torch, and handwritten digits as spike trains.

T time steps, B batch, I inputs (64 pixels), H neurons, O outputs (10 digits).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Data = tuple[Tensor, Tensor]


class Spike(torch.autograd.Function):
    """1 where the potential is above 1; its derivative is taken to be a bell around 1.

    The bell is damped by 0.3, as in Bellec et al. (2018), arXiv 1803.09574: without it gradients explode over
    hundreds of steps.
    """

    @staticmethod
    def forward(ctx, v):  # type: ignore[no-untyped-def]
        """Spikes of potentials."""
        ctx.save_for_backward(v)
        return (v > 1).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Gradients of potentials from those of spikes."""
        (v,) = ctx.saved_tensors
        return 0.3 * grad / (1 + (torch.pi * (v - 1)) ** 2)


class Network(nn.Module):
    """Recurrent leaky integrate-and-fire neurons, and a leaky readout that is averaged over time."""

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.inputs, self.readout = nn.Linear(64, neurons), nn.Linear(neurons, 10)
        self.recurrent = nn.Linear(neurons, neurons, bias=False)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """Scores (B, O) of spike trains (T, B, I)."""
        v_BH = z_BH = x_TBI.new_zeros(x_TBI.shape[1], self.inputs.out_features)
        u_BO = mean_BO = x_TBI.new_zeros(x_TBI.shape[1], 10)
        for t in range(x_TBI.shape[0]):
            v_BH = 0.95 * v_BH * (1 - z_BH) + self.inputs(x_TBI[t]) + self.recurrent(z_BH)
            z_BH = Spike.apply(v_BH)  # type: ignore[no-untyped-call]
            u_BO = 0.9 * u_BO + self.readout(z_BH)
            mean_BO = mean_BO + u_BO / x_TBI.shape[0]
        return mean_BO


def digits(held_out: int = 360) -> tuple[Data, Data]:
    """To train on and held out: images (brightness in [0, 1]) and their labels."""
    from sklearn.datasets import load_digits  # only these images need it

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x_NI, y_N = torch.tensor(images).float()[order] / 16, torch.tensor(labels)[order]
    return (x_NI[held_out:], y_N[held_out:]), (x_NI[:held_out], y_N[:held_out])


def spike_trains(x_BI: Tensor, steps: int) -> Tensor:
    """Random spikes (T, B, I) whose rates are a fifth of the brightness."""
    return (torch.rand(steps, *x_BI.shape) < 0.2 * x_BI).to(x_BI.dtype)


def image_sets(mnist: Path | None) -> tuple[Any, Any]:
    """To train on and to test on, for a DataLoader: MNIST in a folder, or without one the digits."""
    if mnist is None:
        known, unknown = digits()
        return TensorDataset(*known), TensorDataset(*unknown)
    from torchvision import datasets, transforms  # it downloads what is not in the folder

    known, unknown = (datasets.MNIST(mnist, train, transforms.ToTensor(), download=True) for train in (True, False))
    return known, unknown
