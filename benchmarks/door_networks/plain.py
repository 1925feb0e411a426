"""Loops in plain PyTorch, as papers' code has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from door_networks.case import Make, Network, over_time
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

T, B, IN, N = 96, 16, 24, 64


def sequence(steps: int = T) -> Tensor:
    """Normal numbers over time."""
    return torch.randn(steps, B, IN)


class Bidirectional(nn.Module):
    """One cell forward and one backward, their states side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.back, self.out = nn.GRUCell(IN, N), nn.GRUCell(IN, N), nn.Linear(2 * N, 5)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """Their readouts."""
        h_BN = g_BN = x_TBI.new_zeros(x_TBI.shape[1], N)
        ahead, back = list[Tensor](), list[Tensor]()
        for t in range(x_TBI.shape[0]):
            h_BN = self.ahead(x_TBI[t], h_BN)
            ahead.append(h_BN)
        for t in reversed(range(x_TBI.shape[0])):
            g_BN = self.back(x_TBI[t], g_BN)
            back.insert(0, g_BN)
        return self.out(torch.cat([torch.stack(ahead), torch.stack(back)], -1))


class Attention(nn.Module):
    """Sequence to sequence: the decoder attends to all states of the encoder (Bahdanau et al., arXiv 1409.0473)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRUCell(IN, N), nn.GRUCell(2 * N, N)
        self.query, self.key, self.score = nn.Linear(N, N), nn.Linear(N, N), nn.Linear(N, 1)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The decoder's states."""
        h_BN, states = x_TBI.new_zeros(x_TBI.shape[1], N), []
        for x_BI in x_TBI:
            h_BN = self.encoder(x_BI, h_BN)
            states.append(h_BN)
        states_TBN = torch.stack(states)
        keys_TBN, y_BN, outs = self.key(states_TBN), torch.zeros_like(h_BN), []
        for _ in range(x_TBI.shape[0]):
            weights_TB1 = torch.softmax(self.score(torch.tanh(keys_TBN + self.query(h_BN))), dim=0)
            h_BN = self.decoder(torch.cat([y_BN, (weights_TB1 * states_TBN).sum(0)], -1), h_BN)
            y_BN = h_BN
            outs.append(y_BN)
        return torch.stack(outs)


class WarmUp(nn.Module):
    """A readout that starts after ten steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(IN, N), nn.Linear(N, 5)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The sum of the readouts."""
        h_BN = x_TBI.new_zeros(x_TBI.shape[1], N)
        y_B5 = x_TBI.new_zeros(x_TBI.shape[1], 5)
        for t in range(x_TBI.shape[0]):
            h_BN = self.cell(x_TBI[t], h_BN)
            if t >= 10:
                y_B5 = y_B5 + self.out(h_BN)
        return y_B5


class Clockwork(nn.Module):
    """A slow state that moves once in 20 steps (Koutnik et al., arXiv 1402.3511)."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.GRUCell(IN + N, N), nn.GRUCell(N, N)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The last fast state."""
        h_BN = s_BN = x_TBI.new_zeros(x_TBI.shape[1], N)
        for t in range(x_TBI.shape[0]):
            h_BN = self.fast(torch.cat([x_TBI[t], s_BN], -1), h_BN)
            if t % 20 == 0:
                s_BN = self.slow(h_BN, s_BN)
        return h_BN


class Packed(nn.Module):
    """``nn.LSTM`` on sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(IN, N)

    def forward(self, x_TBI: Tensor, lengths_B: Tensor) -> Tensor:
        """All states, padded."""
        packed = pack_padded_sequence(x_TBI, lengths_B, enforce_sorted=False)
        y, _ = self.layer(packed)
        return pad_packed_sequence(y, total_length=x_TBI.shape[0])[0]


class Masked(nn.Module):
    """A loop that holds the state of sequences that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(IN, N)

    def forward(self, x_TBI: Tensor, lengths_B: Tensor) -> Tensor:
        """The last states."""
        h_BN = x_TBI.new_zeros(x_TBI.shape[1], N)
        for t in range(x_TBI.shape[0]):
            h_BN = torch.where((t < lengths_B)[:, None], self.cell(x_TBI[t], h_BN), h_BN)
        return h_BN


class WorldModel(nn.Module):
    """A recurrent state-space model with sampled categorical latents (Hafner et al., arXiv 2010.02193)."""

    def __init__(self, classes: int = 8, groups: int = 8) -> None:
        super().__init__()
        self.shape = groups, classes
        self.cell, self.prior = nn.GRUCell(groups * classes, N), nn.Linear(N, groups * classes)
        self.posterior, self.decode = nn.Linear(N + IN, groups * classes), nn.Linear(N + groups * classes, IN)

    def sample(self, logits_BZ: Tensor) -> Tensor:
        """One-hot samples, with the gradient of their probabilities (straight through)."""
        probabilities_BGC = torch.softmax(logits_BZ.unflatten(-1, self.shape), -1)
        index_BG = torch.multinomial(probabilities_BGC.flatten(0, 1), 1).view(-1, self.shape[0])
        hot_BGC = F.one_hot(index_BG, self.shape[1]).float()
        return (hot_BGC + probabilities_BGC - probabilities_BGC.detach()).flatten(1)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """The loss."""
        h_BN = x_TBI.new_zeros(x_TBI.shape[1], N)
        z_BZ, losses = x_TBI.new_zeros(x_TBI.shape[1], self.prior.out_features), []
        for x_BI in x_TBI:
            h_BN = self.cell(z_BZ, h_BN)
            prior_BZ, posterior_BZ = self.prior(h_BN), self.posterior(torch.cat([h_BN, x_BI], -1))
            z_BZ = self.sample(posterior_BZ)
            losses.append(
                F.mse_loss(self.decode(torch.cat([h_BN, z_BZ], -1)), x_BI) + F.mse_loss(prior_BZ, posterior_BZ)
            )
        return torch.stack(losses).mean()


class StateSpace(nn.Module):
    """A diagonal state-space layer, step by step (Gu et al., arXiv 2206.11893)."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-3, 0, N))
        self.b, self.c = nn.Linear(IN, N), nn.Linear(N, IN)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """A sequence."""
        h_BN, outs = x_BTI.new_zeros(x_BTI.shape[0], N), []
        a_N = torch.exp(-torch.exp(self.decay))
        for t in range(x_BTI.size(1)):
            h_BN = a_N * h_BN + self.b(x_BTI[:, t])
            outs.append(F.gelu(self.c(h_BN)) + x_BTI[:, t])
        return torch.stack(outs, 1)


class Reservoir(nn.Module):
    """An echo state network: only the readout learns."""

    def __init__(self) -> None:
        super().__init__()
        self.w: Tensor
        self.w_in: Tensor
        self.register_buffer("w", torch.randn(N, N) * 0.9 / N**0.5)
        self.register_buffer("w_in", torch.randn(IN, N) / IN**0.5)
        self.readout = nn.Linear(N, 3)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """Readouts of all states."""
        h_BN, states = torch.zeros(x_TBI.shape[1], N), []
        for x_BI in x_TBI:
            h_BN = 0.7 * h_BN + 0.3 * torch.tanh(x_BI @ self.w_in + h_BN @ self.w)
            states.append(h_BN)
        return self.readout(torch.stack(states))


class ConvLSTM(nn.Module):
    """Gates by convolutions (Shi et al., arXiv 1506.04214)."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.gates, self.channels = nn.Conv2d(1 + channels, 4 * channels, 3, padding=1), channels

    def forward(self, x_BT1HW: Tensor) -> Tensor:
        """The last state."""
        batch, steps, _, height, width = x_BT1HW.size()
        h_BCHW = c_BCHW = torch.zeros(batch, self.channels, height, width)
        for t in range(steps):
            i, f, o, g = self.gates(torch.cat([x_BT1HW[:, t], h_BCHW], 1)).chunk(4, 1)
            c_BCHW = torch.sigmoid(f) * c_BCHW + torch.sigmoid(i) * torch.tanh(g)
            h_BCHW = torch.sigmoid(o) * torch.tanh(c_BCHW)
        return h_BCHW


def with_lengths(model: nn.Module) -> Network:
    """Sequences of several lengths, sorted as they come."""
    lengths_B = torch.randint(T // 3, T + 1, (B,))
    lengths_B[3] = T
    return over_time(model, sequence(), lengths_B)


def layer(kind: Any, **options: Any) -> Make:
    """A layer of torch."""
    return lambda: over_time(kind(IN, N, **options), sequence())


NETWORKS: dict[str, Make] = {
    "nn.LSTM, two layers": layer(nn.LSTM, num_layers=2),
    "nn.GRU, bidirectional": layer(nn.GRU, bidirectional=True),
    "nn.LSTM, packed": lambda: with_lengths(Packed()),
    "two directions": lambda: over_time(Bidirectional(), sequence()),
    "attention over all states": lambda: over_time(Attention(), sequence(48)),
    "a late readout": lambda: over_time(WarmUp(), sequence()),
    "clockwork of 20 steps": lambda: over_time(Clockwork(), sequence(160)),
    "mask of lengths": lambda: with_lengths(Masked()),
    "world model": lambda: over_time(WorldModel(), sequence()),
    "state space": lambda: over_time(StateSpace(), torch.randn(B, T, IN)),
    "reservoir": lambda: over_time(Reservoir(), sequence()),
    "ConvLSTM": lambda: over_time(ConvLSTM(), torch.randn(8, 40, 1, 16, 16)),
}
