"""The networks of ``epoch.py``: a training program, how ``reroll.compile`` is told its loop, and where its batch is.

Shape letters: T time, B batch, I inputs, S tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import depth_networks
import speed_networks
import torch
from door_networks import spiking
from door_networks.case import Network, over_time
from losses import CASES, LanguageModel
from torch import Tensor, nn

STEPS = 100


@dataclass(frozen=True, slots=True)
class Script:
    """A network, and for each of its inputs the dimension of the batch, or None.

    jax: the name that ``epoch_jax.py`` has for it.
    """

    make: Callable[[], Network]
    dims: tuple[int | None, ...]
    jax: str | None = None


class WithLoss(nn.Module):
    """A network of which a call gives the loss."""

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """A number."""
        return self.loss(self.network(x), target)


def of_speed(name: str) -> Network:
    """A network of ``speed.py`` at 100 steps."""
    make, inputs, _ = (speed_networks.NETWORKS | speed_networks.MORE)[name]
    return over_time(make(), inputs(STEPS))


def language_model() -> Network:
    """That of ``losses.py``, with its loss over all steps."""
    _, loss, _ = CASES["language model"][0](STEPS)
    text_TB = torch.randint(128, (STEPS + 1, 16))
    model = WithLoss(LanguageModel(128, 128, 2), loss)
    return over_time(model, text_TB[:-1], text_TB[1:])


def gpt() -> Network:
    """12 blocks, rolled over depth."""
    case = depth_networks.NETWORKS["GPT"]
    model = WithLoss(case.make(12), depth_networks.loss_of)
    return Network(model, (model,), case.batch())


SCRIPTS: dict[str, Script] = {
    "recurrent LIF (D2r)": Script(lambda: of_speed("recurrent LIF (D2r)"), (1,), "D2r"),
    "snnTorch: tutorial 5": Script(spiking.tutorial_5, (0,)),
    "snnTorch: tutorial 6": Script(spiking.tutorial_6, (None, None, 0)),
    "SpikingJelly: step by step": Script(lambda: spiking.jelly_net(multi=False), (1,)),
    "nn.LSTM": Script(lambda: of_speed("nn.LSTM"), (1,), "LSTM"),
    "GRU language model": Script(language_model, (1, 1), "language model"),
    "GPT 12": Script(gpt, (0, 0), "GPT"),
}


def smaller(inputs: tuple[Any, ...], dims: tuple[int | None, ...]) -> tuple[Any, ...]:
    """Inputs with two thirds of the batch."""
    pairs = zip(inputs, dims, strict=True)
    return tuple(x if d is None else x.narrow(d, 0, 2 * x.shape[d] // 3).contiguous() for x, d in pairs)
