"""What is captured on a card: layers of torch's, convolutions, lengths and batches that change, libraries."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll
from networks import RecurrentLIF, Spike
from on_card import DOORS, NETWORKS, SINGLE, B, H, I, agrees, sequence
from recorded_networks import leaky_network

EAGER: dict[str, Any] = {"lowering": "eager", "segment": 2}
INDUCTOR = pytest.param("inductor", marks=pytest.mark.inductor)
LOWERINGS = pytest.mark.parametrize("lowering", ["eager", INDUCTOR])
LENGTHS = (20, 33, 20, 7)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error::reroll.RerollWarning")]


class Layered(nn.Module):
    """A recurrent layer of torch's, of which all outputs are read."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x_TBI: Tensor) -> Tensor:
        y_TBH: Tensor = self.rnn(x_TBI)[0]
        return y_TBH.tanh()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(I, H),
    "lstm of two layers both ways": lambda: nn.LSTM(I, H, 2, bidirectional=True),
    "gru": lambda: nn.GRU(I, H, 2),
    "rnn": lambda: nn.RNN(I, H),
    "relu both ways": lambda: nn.RNN(I, H, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize("schedule", ["store_all", "double"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torchs(name: str, schedule: str, card: torch.device) -> None:
    """CuDNN's, where eager runs them."""
    model, given = Layered(LAYERS[name]()).double().to(card), [(sequence(card, steps),) for steps in (20, 33)]
    agrees(model, lambda twin: DOORS["compile"](twin, **EAGER, schedule=schedule), given)


@pytest.mark.inductor
def test_a_layer_with_kernels_of_inductor(card: torch.device) -> None:
    model = Layered(nn.LSTM(I, H, 2)).to(card)
    given = [(sequence(card, steps, torch.float32),) for steps in (20, 33)]
    agrees(model, lambda twin: DOORS["compile"](twin, schedule="standard"), given, SINGLE)


class Convolved(nn.Module):
    """Spikes of a convolution, which excite the same places again, and a pooled readout of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.back = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.out = nn.Linear(4, 3)

    def forward(self, x_TBCXY: Tensor) -> Tensor:
        v_BCXY = z_BCXY = x_TBCXY.new_zeros(x_TBCXY.shape[1], 4, *x_TBCXY.shape[3:])
        rows = []
        for t in range(x_TBCXY.shape[0]):
            v_BCXY = 0.9 * v_BCXY * (1 - z_BCXY) + self.read(x_TBCXY[t]) + self.back(z_BCXY)
            z_BCXY = Spike.apply(v_BCXY)  # type: ignore[no-untyped-call]
            rows.append(self.out(F.max_pool2d(z_BCXY + 0.1 * v_BCXY, 2).mean((2, 3))))
        return torch.stack(rows)


@LOWERINGS
def test_a_convolutional_spiking_network(lowering: str, card: torch.device) -> None:
    given = [(3 * torch.randn(steps, B, 2, 6, 6, dtype=torch.float64).to(card),) for steps in (12, 17)]
    options = {"lowering": lowering, "segment": 2, "schedule": "double"}
    agrees(Convolved().double().to(card), lambda twin: DOORS["compile"](twin, **options), given)


@LOWERINGS
@pytest.mark.parametrize("name", NETWORKS)
def test_lengths_and_batches_change_from_call_to_call(name: str, lowering: str, card: torch.device) -> None:
    options = {"lowering": lowering, "segment": 2, "schedule": "standard"}
    given = [(sequence(card, steps, batch=batch),) for steps, batch in zip(LENGTHS, (4, 4, 7, 5), strict=True)]
    agrees(NETWORKS[name]().double().to(card), lambda twin: DOORS["compile"](twin, **options), given)


@pytest.mark.inductor
@pytest.mark.parametrize("without", [(), ("event-products",)], ids=["events", "no events"])
def test_products_of_spikes(without: tuple[str, ...], card: torch.device) -> None:
    passes = tuple(name for name in reroll.DEFAULT_PASSES if name not in without)
    model, given = RecurrentLIF(I, 192, 3).double().to(card), [(sequence(card, 20, batch=32),)]
    agrees(model, lambda twin: DOORS["compile"](twin, segment=2, passes=passes), given)


@pytest.mark.parametrize("door", DOORS)
def test_the_default_device(door: str, card: torch.device, pytestconfig: pytest.Config) -> None:
    torch.set_default_device(card)
    try:
        model, given = NETWORKS["lif"]().double(), [(4 * (torch.rand(24, B, I) < 0.4).double(),)]
        assert next(model.parameters()).device.type == card.type
        agrees(model, lambda twin: DOORS[door](twin, **EAGER, schedule="double"), given)
    finally:
        torch.set_default_device(pytestconfig.getoption("--device"))


def test_snntorch(card: torch.device) -> None:
    snn = pytest.importorskip("snntorch")
    given = [(sequence(card, steps, torch.float32),) for steps in LENGTHS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", reroll.RerollWarning)  # where it is recorded, as Dynamo refuses it
        agrees(leaky_network(snn, I, H).to(card), lambda twin: DOORS["compile"](twin, **EAGER), given, SINGLE)
