"""Networks of snnTorch, SpikingJelly, Norse, Sinabs and Rockpool, as their documentation writes them."""

from __future__ import annotations

from typing import Any

import torch
from door_networks.case import Make, Network, over_time
from torch import Tensor, nn

T, B = 64, 16


def frames(steps: int = T, channels: int = 2, size: int = 16) -> Tensor:
    """Events of a camera."""
    return (torch.rand(steps, B, channels, size, size) < 0.2).float()


def spikes(steps: int = T, features: int = 40) -> Tensor:
    """Spikes of 40 lines."""
    return (torch.rand(steps, B, features) < 0.3).float()


def livelier(net: nn.Module, factor: float = 4.0) -> None:
    """Weights with which neurons spike in all layers before training."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.weight.data.mul_(factor)


def tutorial_5() -> Network:
    """A static image, given at every step; the number of steps is an attribute."""
    import snntorch as snn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_steps = 25
            self.fc1, self.lif1 = nn.Linear(28 * 28, 200), snn.Leaky(beta=0.95)
            self.fc2, self.lif2 = nn.Linear(200, 10), snn.Leaky(beta=0.95)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mem1, mem2 = self.lif1.init_leaky(), self.lif2.init_leaky()
            spk2_rec, mem2_rec = [], []
            for _ in range(self.num_steps):
                spk1, mem1 = self.lif1(self.fc1(x), mem1)
                spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
                spk2_rec.append(spk2)
                mem2_rec.append(mem2)
            return torch.stack(spk2_rec, dim=0), torch.stack(mem2_rec, dim=0)

    model = Net()
    return Network(model, (model,), (torch.rand(B, 28 * 28),))


def tutorial_6() -> Network:
    """A static image and ``utils.reset`` inside the forward pass function, which is told the number of steps."""
    import snntorch as snn
    from snntorch import surrogate, utils

    grad: Any = surrogate.fast_sigmoid(slope=25)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 5),
        nn.MaxPool2d(2),
        snn.Leaky(beta=0.5, spike_grad=grad, init_hidden=True),
        nn.Conv2d(8, 16, 5),
        nn.MaxPool2d(2),
        snn.Leaky(beta=0.5, spike_grad=grad, init_hidden=True),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
        snn.Leaky(beta=0.5, spike_grad=grad, init_hidden=True, output=True),
    )

    def forward_pass(net: nn.Module, num_steps: int, data: Tensor) -> tuple[Tensor, Tensor]:
        mem_rec, spk_rec = [], []
        utils.reset(net)
        for _ in range(num_steps):
            spk_out, mem_out = net(data)
            spk_rec.append(spk_out)
            mem_rec.append(mem_out)
        return torch.stack(spk_rec), torch.stack(mem_rec)

    return Network(forward_pass, (net,), (net, 50, torch.rand(B, 1, 28, 28)))


def tutorial_7() -> Network:
    """Events of a camera, a step at a time."""
    import snntorch as snn
    from snntorch import surrogate, utils

    grad: Any = surrogate.atan()
    net = nn.Sequential(
        nn.Conv2d(2, 6, 5),
        nn.MaxPool2d(2),
        snn.Leaky(beta=0.5, spike_grad=grad, init_hidden=True),
        nn.Flatten(),
        nn.Linear(6 * 6 * 6, 10),
        snn.Leaky(beta=0.5, spike_grad=grad, init_hidden=True, output=True),
    )

    livelier(net)

    def forward_pass(net: nn.Module, data: Tensor) -> Tensor:
        spk_rec = []
        utils.reset(net)
        for step in range(data.size(0)):
            spk_out, _ = net(data[step])
            spk_rec.append(spk_out)
        return torch.stack(spk_rec)

    return Network(forward_pass, (net,), (net, frames()))


def snntorch_layer(name: str, **options: Any) -> Make:
    """Two layers of neurons whose states the loop carries."""

    def make() -> Network:
        import snntorch as snn

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc1, self.fc2 = nn.Linear(40, 60), nn.Linear(60, 10)
                self.lif1 = getattr(snn, name)(**options)
                self.lif2 = snn.Leaky(beta=0.9)

            def forward(self, x: Tensor) -> Tensor:
                first = self.lif1.init_rleaky() if name == "RLeaky" else self.lif1.reset_mem()
                state = first if isinstance(first, tuple) else (first,)
                mem2 = self.lif2.init_leaky()
                rows = []
                for step in range(x.size(0)):
                    spk1, *state = self.lif1(self.fc1(x[step]), *state)
                    spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
                    rows.append(spk2)
                return torch.stack(rows, dim=0)

        return over_time(Net(), spikes())

    return make


def jelly_net(multi: bool) -> Network:
    """A convolutional network in either step mode; ``functional.reset_net`` before each batch."""
    from spikingjelly.activation_based import functional, layer, neuron, surrogate

    net = nn.Sequential(
        layer.Conv2d(2, 32, 3, padding=1, bias=False),
        layer.BatchNorm2d(32),
        neuron.IFNode(surrogate_function=surrogate.ATan()),
        layer.MaxPool2d(2, 2),
        layer.Conv2d(32, 32, 3, padding=1, bias=False),
        layer.BatchNorm2d(32),
        neuron.LIFNode(surrogate_function=surrogate.ATan()),
        layer.MaxPool2d(2, 2),
        layer.Flatten(),
        layer.Linear(32 * 4 * 4, 10, bias=False),
        neuron.LIFNode(surrogate_function=surrogate.ATan()),
    )
    livelier(net)
    x = frames(32)
    if multi:
        functional.set_step_mode(net, "m")
        return over_time(net, x, reset=lambda: functional.reset_net(net))

    def forward(x: Tensor) -> Tensor:
        """The result."""
        out: Any = 0.0
        for t in range(x.shape[0]):
            out += net(x[t])
        return out / x.shape[0]

    return Network(forward, (net,), (x,), lambda: functional.reset_net(net))


def jelly_container() -> Network:
    """``SeqToANNContainer`` and parametric LIF neurons at T = batch = channels = 32."""
    from spikingjelly.activation_based import functional, layer, neuron

    net = nn.Sequential(
        layer.SeqToANNContainer(nn.Conv2d(2, 32, 3, padding=1), nn.BatchNorm2d(32)),
        neuron.ParametricLIFNode(step_mode="m"),
        layer.SeqToANNContainer(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)),
        neuron.ParametricLIFNode(step_mode="m"),
    )
    livelier(net, 16.0)
    x = (torch.rand(32, 32, 2, 8, 8) < 0.2).float()
    return over_time(net, x, reset=lambda: functional.reset_net(net))


def norse_cells() -> Network:
    """Cells in a Python loop that begin without a state."""
    import norse.torch as norse

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.cell = nn.Linear(40, 60), norse.LIFCell()
            self.out, self.readout = nn.Linear(60, 10), norse.LICell()

        def forward(self, x: Tensor) -> Tensor:
            s1 = s2 = None
            rows = []
            for ts in range(x.shape[0]):
                z, s1 = self.cell(self.fc(x[ts]), s1)
                v, s2 = self.readout(self.out(z), s2)
                rows.append(v)
            return torch.stack(rows)

    return over_time(Net(), spikes())


def norse_sequential() -> Network:
    """``SequentialState`` in a loop."""
    import norse.torch as norse

    net = norse.SequentialState(nn.Linear(40, 60), norse.LIFRecurrentCell(60, 60), nn.Linear(60, 10), norse.LICell())

    def forward(x: Tensor) -> Tensor:
        """The result."""
        state, rows = None, []
        for x_t in x:
            out, state = net(x_t, state)
            rows.append(out)
        return torch.stack(rows)

    return Network(forward, (net,), (spikes(),))


def norse_layers() -> Network:
    """Layers that have a loop of their own."""
    import norse.torch as norse

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.fc = norse.LIFRecurrent(40, 60), norse.LIF(), nn.Linear(60, 10)

        def forward(self, x: Tensor) -> Tensor:
            z, _ = self.one(x)
            z, _ = self.two(z)
            return self.fc(z)

    return over_time(Net(), spikes())


def norse_lsnn() -> Network:
    """Neurons with a threshold that adapts (Bellec et al., arXiv 1803.09574)."""
    import norse.torch as norse

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.fc = norse.LSNNRecurrent(40, 60), nn.Linear(60, 10)

        def forward(self, x: Tensor) -> Tensor:
            z, _ = self.layer(x)
            return self.fc(z)

    return over_time(Net(), spikes())


def sinabs_net(name: str, **options: Any) -> Make:
    """A layer of Sinabs between two linear ones; ``reset_states`` inside the forward."""

    def make() -> Network:
        import sinabs.layers as sl

        if name.endswith("Recurrent"):
            options["rec_connect"] = nn.Linear(60, 60, bias=False)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc1, self.fc2 = nn.Linear(40, 60), nn.Linear(60, 10)
                self.lif = getattr(sl, name)(**options)
                self.out = sl.ExpLeak(tau_mem=10.0)

            def forward(self, x_BTC: Tensor) -> Tensor:
                self.lif.reset_states()
                self.out.reset_states()
                return self.out(self.fc2(self.lif(self.fc1(x_BTC))))

        return over_time(Net(), spikes().transpose(0, 1).contiguous())

    return make


def rockpool_lif() -> Network:
    """Rockpool's LIF in torch, which takes a batch of sequences and begins from its last state."""
    from rockpool.nn.modules import LIFTorch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.lif1 = nn.Linear(40, 60), LIFTorch(60, dt=1e-3)
            self.fc2, self.lif2 = nn.Linear(60, 10), LIFTorch(10, dt=1e-3)

        def forward(self, x_BTC: Tensor) -> Tensor:
            x, _, _ = self.lif1(self.fc1(x_BTC))
            out, _, _ = self.lif2(self.fc2(x))
            return out

    net = Net()
    livelier(net)

    def reset() -> None:
        net.lif1.reset_state()
        net.lif2.reset_state()

    return over_time(net, spikes().transpose(0, 1).contiguous(), reset=reset)


NETWORKS: dict[str, Make] = {
    "snnTorch: tutorial 5": tutorial_5,
    "snnTorch: tutorial 6": tutorial_6,
    "snnTorch: tutorial 7": tutorial_7,
    "snnTorch: RLeaky": snntorch_layer("RLeaky", beta=0.9, linear_features=60),
    "snnTorch: Synaptic": snntorch_layer("Synaptic", alpha=0.9, beta=0.8),
    "SpikingJelly: step by step": lambda: jelly_net(multi=False),
    "SpikingJelly: multi-step": lambda: jelly_net(multi=True),
    "SpikingJelly: containers": jelly_container,
    "Norse: cells": norse_cells,
    "Norse: SequentialState": norse_sequential,
    "Norse: LIFRecurrent, LIF": norse_layers,
    "Norse: LSNNRecurrent": norse_lsnn,
    "Sinabs: LIF": sinabs_net("LIF", tau_mem=20.0),
    "Sinabs: LIFRecurrent": sinabs_net("LIFRecurrent", tau_mem=20.0),
    "Sinabs: ALIF": sinabs_net("ALIF", tau_mem=20.0, tau_adapt=20.0),
    "Rockpool: LIFTorch": rockpool_lif,
}
