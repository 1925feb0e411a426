"""Backward passes draw their random numbers again from generators of their own: torch's belong to all threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pairs import compiled
from reroll.backends.runtime.randomness import OwnNumbers

D = torch.float64
aten = torch.ops.aten
X = torch.randn(6, 5, dtype=D).t()

DRAWS: dict[str, Any] = {
    "native_dropout": lambda: torch.native_dropout(X, 0.3, True)[0],
    "all dropped": lambda: torch.native_dropout(X, 1.0, True)[0],
    "none dropped": lambda: torch.native_dropout(X, 0.0, True)[0],
    "not trained": lambda: torch.native_dropout(X, 0.5, False)[0],
    "dropout": lambda: nn.functional.dropout(X, 0.3),
    "alpha_dropout": lambda: nn.functional.alpha_dropout(X, 0.3),
    "feature_dropout": lambda: nn.functional.dropout2d(torch.ones(3, 4, 2, 2), 0.5),
    "rand": lambda: torch.rand(7),
    "randn_like": lambda: torch.randn_like(X),
    "rand_like": lambda: torch.rand_like(X),
    "randint": lambda: torch.randint(0, 9, (11,)),
    "randint low_out": lambda: aten.randint.low_out(-9, 9, [4], out=torch.empty(4, dtype=torch.int64)),
    "randperm": lambda: torch.randperm(9),
    "bernoulli": lambda: torch.bernoulli(X.sigmoid()),
    "normal_": lambda: torch.empty(7).normal_(),
    "exponential_": lambda: torch.empty(7).exponential_(),
    "multinomial": lambda: torch.multinomial(X.sigmoid(), 3),
    "poisson": lambda: torch.poisson(X.exp()),
    "rrelu": lambda: nn.functional.rrelu(X, training=True),
    "gumbel": lambda: nn.functional.gumbel_softmax(X),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_operations_draw_the_same_numbers_and_leave_torchs_alone(draw: str) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    expected = [DRAWS[draw]() for _ in range(3)]
    behind = torch.get_rng_state()
    torch.manual_seed(5)
    here = torch.get_rng_state()
    own = OwnNumbers((state,))
    with own.drawing():
        found = [DRAWS[draw]() for _ in range(3)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert torch.equal(own.state(())[0], behind)
    assert torch.equal(torch.get_rng_state(), here)


class Noisy(nn.Module):
    """Dropout and noise in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(3, 4)
        for t in range(x.shape[0]):
            h = torch.tanh(self.cell(x[t]) + nn.functional.dropout(h, 0.3)) + 0.1 * torch.randn_like(h)
        return h


SCHEDULES = [{"schedule": "standard", "segment": 2, "chunk": 5}, {"schedule": "revolve", "segment": 1, "slots": 2}]


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda options: options["schedule"])
def test_another_threads_numbers_are_neither_rewound_nor_taken(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, x = Noisy().to(D), torch.randn(20, 3, 4, dtype=D)
    model = compiled(net, lowering="eager", verify=True, **options)

    def gradient(run: Any) -> Tensor:
        torch.manual_seed(1)
        loss = run(x).sum()
        stop, drawn = threading.Event(), list[float]()
        other = threading.Thread(target=lambda: _draw(stop, drawn))
        other.start()
        try:
            while not drawn:
                pass
            (found,) = torch.autograd.grad(loss, [net.cell.weight])
        finally:
            stop.set()
            other.join()
        assert len(set(drawn)) == len(drawn)  # a number that came twice was rewound
        return found

    expected = gradient(net)
    for _ in range(5):
        torch.testing.assert_close(gradient(model), expected, rtol=1e-12, atol=1e-12)


def _draw(stop: threading.Event, drawn: list[float]) -> None:
    while not stop.is_set():
        drawn.append(torch.rand((), dtype=D).item())
