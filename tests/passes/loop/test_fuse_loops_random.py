"""Random layers with random operations between, and torch's own layers: fused where legal, and always right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import B, H, Layer, Leaky, Net, T, check
from rnns import needs_final_states_of_lstm

ROWWISE: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh,
    lambda y: y.flatten(0, 1).mul(0.5).view(y.shape),
    lambda y: F.relu(y - 0.2) + y,
    lambda y: y.permute(1, 0, 2).softmax(-1).permute(1, 0, 2),
    lambda y: y.transpose(0, 2).contiguous().transpose(2, 0),
    lambda y: y.unsqueeze(-1).expand(-1, -1, -1, 3).mean(-1),
    lambda y: y.reshape(*y.shape[:2], 2, 2).amax(-1, keepdim=True).expand(*y.shape[:2], 2, 2).flatten(2),
    lambda y: torch.cat([y[..., 1:], y[..., :1]], -1),
    lambda y: y - y.mean(1, keepdim=True),
    lambda y: torch.stack([y, y * y], 1).sum(1),
    lambda y: y.flip(-1).clone().mul_(2),
    lambda y: y.cumsum(2).narrow(2, 0, 4).clamp(max=2.0),
    lambda y: torch.where(y > 0.5, y, 0.1 * y),
    lambda y: F.avg_pool2d(y.flatten(0, 1).view(-1, 1, 2, 2), 1).squeeze(1).view(y.shape),
)
MIXING: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda y: y.flip(0),
    lambda y: y - y.mean(0),
    lambda y: y.transpose(0, 1).reshape(y.shape),
    lambda y: y.roll(1, 0),
    lambda y: torch.cat([y[1:], y[:1]]),
)


@pytest.mark.variants(4)
@pytest.mark.parametrize("seed", range(6))
def test_random_stacks(seed: int) -> None:
    """Random layers with random operations between: right at every batch size, that of as many items as steps too."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    depth = draw.choice((2, 2, 3))
    layers = [draw.choice((Layer, lambda: Layer(False), Leaky))() for _ in range(depth)]
    ops = [[draw.choice(ROWWISE) for _ in range(draw.randint(0, 3))] for _ in range(depth)]
    mixes = draw.random() < 0.3
    if mixes:
        ops[1].insert(draw.randint(0, len(ops[1])), draw.choice(MIXING))

    def run(x: Tensor, *parts: nn.Module) -> Tensor:
        for part, between_them in zip(parts, ops, strict=True):
            for op in between_them:
                x = op(x)
            x = part(x)
        return x

    steps = draw.choice((7, 9, 12))
    options = ({"schedule": "standard"}, {"schedule": "double", "chunk": 5, "slots": 2, "verify": True})[seed % 2]
    made = check(Net(run, *layers), torch.randn(steps, draw.choice((1, 2, steps)), H), **options)
    assert len(made.recurrences) == 1 + mixes


@pytest.mark.variants(4)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
def test_stacked_layers_of_torch(kind: Any, batch_first: bool) -> None:
    if kind is nn.LSTM:
        needs_final_states_of_lstm()
    layers = kind(H, 3, num_layers=3, batch_first=batch_first)
    x = torch.randn((B, T, H) if batch_first else (T, B, H))
    with torch._dynamo.config.patch(allow_rnn=True):
        made = check(Net(lambda x, rnn: rnn(x), layers), x)
    assert [each.steps for each in made.recurrences] == [T]
    assert not made.notes


def test_dropout_between_layers_of_torch_is_cut() -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        made = check(Net(lambda x, rnn: rnn(x), nn.GRU(H, 3, num_layers=2, dropout=0.3)), torch.randn(T, B, H))
    assert len(made.recurrences) == 2
    assert "dropout" in made.notes[0]
