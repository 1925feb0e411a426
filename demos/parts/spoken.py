"""Spoken digits as events of a cochlea, made by a generator in the manner of Heidelberg's, and a network that listens.

A word is a few formants: smooth tracks over the channels, each loud for a part of the word. Words 10 to 19 are words 0
to 9 spoken backwards, so that counting the events of a channel does not tell them apart. Who speaks moves the
channels, warps time, misses events and makes noise. T time steps, B batch, C channels, F formants, H neurons, K words.
"""

import torch
from parts.spiking import Spike
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, interpolate, pad

Words = tuple[Tensor, Tensor]
WORDS, FORMANTS, KNOTS = 20, 3, 6


def smooth(count: int, steps: int, knots: int = KNOTS) -> Tensor:
    """Random smooth curves between 0 and 1, (count, T)."""
    curve = interpolate(torch.rand(count, 1, knots), size=steps, mode="linear", align_corners=True)
    width = max(steps // knots, 1) | 1
    return avg_pool1d(pad(curve, (width // 2,) * 2, mode="replicate"), width, 1).squeeze(1)


def vocabulary(steps: int) -> Tensor:
    """Place and loudness of the formants of each word, (words, 2, F, T)."""
    spoken = smooth(WORDS // 2 * 2 * FORMANTS, steps).view(WORDS // 2, 2, FORMANTS, steps)
    return torch.cat([spoken, spoken.flip(-1)])


def speak(word_2FT: Tensor, channels: int, rate: float = 0.25, noise: float = 0.004) -> Tensor:
    """Events (T, C) of one word, by a new speaker."""
    steps = word_2FT.shape[-1]
    pace_T = (0.4 + smooth(1, steps)[0]).cumsum(0)
    when_T = ((pace_T / pace_T[-1]) * (steps - 1)).long()
    place_FT, loud_FT = word_2FT[:, :, when_T]
    place_FT = 0.1 + 0.8 * place_FT + 0.04 * torch.randn(1)
    loud_FT = ((loud_FT - 0.35) * 4).clamp(0, 1) * (0.6 + 0.4 * torch.rand(1))
    shape_TC = torch.full((steps, channels), noise)
    at_C = torch.linspace(0, 1, channels)
    for place_T, loud_T in zip(place_FT, loud_FT, strict=True):
        shape_TC += rate * loud_T[:, None] * torch.exp(-(((at_C - place_T[:, None]) / 0.04) ** 2))
    return torch.rand(steps, channels) < shape_TC


def recordings(words_KFT: Tensor, each: int, channels: int) -> Words:
    """Each word by so many speakers: events (T, B, C) as truth values, and the numbers of the words (B)."""
    spoken = [speak(word, channels) for word in words_KFT for _ in range(each)]
    return torch.stack(spoken, dim=1), torch.arange(len(words_KFT)).repeat_interleave(each)


class Listener(nn.Module):
    """Recurrent leaky neurons that forget over 10 to 200 steps; their rates are read out."""

    decay: Tensor

    def __init__(self, channels: int, neurons: int) -> None:
        super().__init__()
        self.inputs, self.recurrent = nn.Linear(channels, neurons, bias=False), nn.Linear(neurons, neurons, bias=False)
        self.readout = nn.Linear(neurons, WORDS)
        self.register_buffer("decay", torch.linspace(0.9, 0.995, neurons))

    def forward(self, x_TBC: Tensor) -> Tensor:
        """Scores (B, K) of events (T, B, C)."""
        v_BH = z_BH = spikes_BH = x_TBC.new_zeros(x_TBC.shape[1], self.inputs.out_features)
        for t in range(x_TBC.shape[0]):
            v_BH = self.decay * v_BH + self.inputs(x_TBC[t]) + self.recurrent(z_BH) - z_BH
            z_BH = Spike.apply(v_BH)  # type: ignore[no-untyped-call]
            spikes_BH = spikes_BH + z_BH
        scores_BK: Tensor = self.readout(10 * spikes_BH / x_TBC.shape[0])
        return scores_BK
