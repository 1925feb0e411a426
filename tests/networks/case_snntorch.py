"""Networks of snnTorch as its documentation and tutorials write them. T time, B batch.

Its surrogates give float32 spikes whatever comes in, so all is float32 but for a network with a surrogate of the
user's own, which the library takes too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from networks_zoo import spike
from training import Case

snn = pytest.importorskip("snntorch")
spikegen, surrogate, utils = (pytest.importorskip(f"snntorch.{name}") for name in ("spikegen", "surrogate", "utils"))

GRAD = surrogate.fast_sigmoid(slope=5)
SINGLE: dict[str, Any] = {"dtype": torch.float32, "tolerance": 3e-5}


class Passed(nn.Module):
    """Two layers whose states the loop hands on; spikes and membranes of the last one are recorded (tutorial 5)."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.fc1, self.lif1, self.fc2, self.lif2 = nn.Linear(3, 5), first, nn.Linear(5, 2), second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state1, state2 = self.lif1.reset_mem(), self.lif2.reset_mem()
        state1, state2 = ((s,) if isinstance(s, Tensor) else s for s in (state1, state2))
        spk2_rec, mem2_rec = [], []
        for step in range(x.shape[0]):
            spk1, *state1 = self.lif1(self.fc1(x[step]), *state1)
            spk2, *state2 = self.lif2(self.fc2(spk1), *state2)
            spk2_rec.append(spk2)
            mem2_rec.append(state2[-1])
        return torch.stack(spk2_rec, dim=0), torch.stack(mem2_rec, dim=0)


class Recurrent(nn.Module):
    """``RLeaky``: the spikes come back, by a matrix in the first layer and by one weight in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(3, 5), snn.RLeaky(beta=0.7, linear_features=5, spike_grad=GRAD)
        self.fc2, self.lif2 = nn.Linear(5, 2), snn.RLeaky(beta=0.7, all_to_all=False, V=0.5, spike_grad=GRAD)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spk1, mem1 = self.lif1.init_rleaky()
        spk2, mem2 = self.lif2.init_rleaky()
        spk2_rec, mem2_rec = [], []
        for step in range(x.shape[0]):
            spk1, mem1 = self.lif1(self.fc1(x[step]), spk1, mem1)
            spk2, mem2 = self.lif2(self.fc2(spk1), spk2, mem2)
            spk2_rec.append(spk2)
            mem2_rec.append(mem2)
        return torch.stack(spk2_rec), torch.stack(mem2_rec)


class SpikingLSTM(nn.Module):
    """The example of ``SLSTM``, as wide as its input: snnTorch 1.0.0 forgets the state at every step of any other."""

    def __init__(self) -> None:
        super().__init__()
        ste = surrogate.straight_through_estimator()
        self.slstm1, self.slstm2 = snn.SLSTM(3, 3, spike_grad=ste), snn.SLSTM(3, 3, spike_grad=ste)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        syn1, mem1 = self.slstm1.init_slstm()
        syn2, mem2 = self.slstm2.init_slstm()
        spk2_rec, mem2_rec = [], []
        for step in range(x.shape[0]):
            spk1, syn1, mem1 = self.slstm1(x[step].flatten(1), syn1, mem1)
            spk2, syn2, mem2 = self.slstm2(spk1, syn2, mem2)
            spk2_rec.append(spk2)
            mem2_rec.append(mem2)
        return torch.stack(spk2_rec), torch.stack(mem2_rec)


class SpikingConvLSTM(nn.Module):
    """The example of ``SConv2dLSTM``: pooling inside of the layers, a leaky readout."""

    def __init__(self) -> None:
        super().__init__()
        ste = surrogate.straight_through_estimator()
        self.sclstm1 = snn.SConv2dLSTM(1, 2, 3, max_pool=2, spike_grad=ste)
        self.sclstm2 = snn.SConv2dLSTM(2, 2, 3, avg_pool=2, spike_grad=ste)
        self.fc1, self.lif1 = nn.Linear(2, 2), snn.Leaky(beta=0.5, spike_grad=GRAD)

    def forward(self, x: Tensor) -> Tensor:
        syn1, mem1 = self.sclstm1.init_sconv2dlstm()
        syn2, mem2 = self.sclstm2.init_sconv2dlstm()
        mem3 = self.lif1.init_leaky()
        spk3_rec = []
        for step in range(x.size(0)):
            spk1, syn1, mem1 = self.sclstm1(x[step], syn1, mem1)
            spk2, syn2, mem2 = self.sclstm2(spk1, syn2, mem2)
            spk3, mem3 = self.lif1(self.fc1(spk2.flatten(1)), mem3)
            spk3_rec.append(spk3 + mem3)
        return torch.stack(spk3_rec)


class Hidden(nn.Module):
    """States hidden in the modules of an ``nn.Sequential``, and the loop of tutorial 6's ``forward_pass``."""

    def __init__(self, *layers: Any, inside: bool = False) -> None:
        super().__init__()
        self.net, self.inside = nn.Sequential(*layers), inside

    def forward(self, data: Tensor) -> tuple[Tensor, Tensor]:
        mem_rec, spk_rec = [], []
        if self.inside:
            utils.reset(self.net)
        for step in range(data.size(0)):
            spk_out, *_, mem_out = self.net(data[step])
            spk_rec.append(spk_out)
            mem_rec.append(mem_out)
        return torch.stack(spk_rec), torch.stack(mem_rec)


class Encoded(nn.Module):
    """Values in [0, 1], made spikes inside of the model by ``spikegen``."""

    def __init__(self, encode: Any) -> None:
        super().__init__()
        self.encode, self.net = encode, passed(snn.Leaky, beta=0.8)

    def forward(self, x: Tensor) -> Any:
        return self.net(self.encode(x))


def passed(layer: Any, **options: Any) -> nn.Module:
    return Passed(layer(spike_grad=GRAD, **options), layer(spike_grad=GRAD, **options))


def hidden(layer: Any, inside: bool = False, **options: Any) -> nn.Module:
    layer.instances.clear()  # those of other tests: ``utils.reset`` resets every layer that was ever made
    last = layer(spike_grad=GRAD, init_hidden=True, output=True, **options)
    first = layer(spike_grad=GRAD, init_hidden=True, **options)
    made = Hidden(nn.Linear(3, 5), first, nn.Linear(5, 2), last, inside=inside)
    utils.reset(made.net)  # it makes globals of the library's, which Dynamo finds only if they are there before
    return made


def reset_hidden(model: Any) -> None:
    utils.reset(model.net)


def convolutional(inside: bool) -> nn.Module:
    """The network of tutorial 6, smaller."""
    snn.Leaky.instances.clear()
    leaky: dict[str, Any] = {"beta": 0.5, "spike_grad": GRAD, "init_hidden": True}
    layers = (nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), snn.Leaky(**leaky))
    return Hidden(*layers, nn.Flatten(), nn.Linear(8, 2), snn.Leaky(**leaky, output=True), inside=inside)


def flat(steps: int) -> tuple[Tensor]:
    return (torch.randn(steps, 2, 3) * 2,)


def spike_trains(steps: int) -> tuple[Tensor]:
    """Made outside of the model, as the tutorials do in the training loop."""
    return (spikegen.rate(torch.rand(2, 3), num_steps=steps),)


def case(make: Any, inputs: Any = flat, loop: int = 5, **options: Any) -> Case:
    return Case(make, inputs, loops=(loop,), steps=7, lengths=(10,), **{**SINGLE, **options})


def rate(x: Tensor) -> Tensor:
    spikes: Tensor = spikegen.rate(torch.sigmoid(x), time_var_input=True)
    return spikes


CASES = {
    "leaky": case(lambda: passed(snn.Leaky, beta=0.8)),
    "leaky_float64": case(
        lambda: Passed(snn.Leaky(beta=0.8, spike_grad=spike), snn.Leaky(beta=0.9, spike_grad=spike)),
        dtype=torch.float64,
        tolerance=1e-12,
    ),
    "leaky_learned": case(
        lambda: passed(snn.Leaky, beta=torch.rand(1), learn_beta=True, learn_threshold=True, reset_mechanism="zero")
    ),
    "rleaky": case(Recurrent, loop=6),
    "synaptic": case(lambda: passed(snn.Synaptic, alpha=0.9, beta=0.8)),
    "alpha": case(lambda: passed(snn.Alpha, alpha=0.9, beta=0.8)),
    "lapicque": case(lambda: passed(snn.Lapicque, R=1, C=1.44)),
    "slstm": case(SpikingLSTM),
    "sconv2dlstm": case(SpikingConvLSTM, lambda steps: (torch.randn(steps, 2, 1, 6, 6),)),
    "leaky_hidden": case(lambda: hidden(snn.Leaky, beta=0.8), loop=7, reset=reset_hidden),
    "leaky_hidden_reset_inside": case(lambda: hidden(snn.Leaky, inside=True, beta=0.8)),
    "synaptic_hidden": case(lambda: hidden(snn.Synaptic, alpha=0.9, beta=0.8), reset=reset_hidden),
    "convolutional_hidden": case(
        lambda: convolutional(False), lambda steps: (torch.randn(steps, 2, 1, 6, 6),), reset=reset_hidden
    ),
    "spikegen_outside": case(lambda: passed(snn.Leaky, beta=0.8), spike_trains),
    "spikegen_rate": case(lambda: Encoded(rate)),
}
