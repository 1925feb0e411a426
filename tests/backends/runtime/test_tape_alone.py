"""Steps that run again for their tape alone leave out what only their outputs need; gradients stay what they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.inductor.lower import Halved

WIDTH, BLOCKS = 192, 6


class Net(nn.Module):
    """Blocks of two layers; the backward of a block does not read what its second layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(BLOCKS))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x_BC: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x_BC = x_BC + down(torch.tanh(up(x_BC)))
        return x_BC


class WithLoss(Net):
    """The same with a loss, whose few bytes are predicted, too; its backward reads what the blocks give."""

    def forward(self, x_BC: Tensor) -> Tensor:
        return super().forward(x_BC).square().mean()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a forward in two gave outputs, and its tape alone."""
    counts = {"outputs": 0, "saved": 0}
    of: dict[str, Any] = {"outputs": Halved.__call__, "saved": Halved.saved}

    def counted(name: str) -> Any:
        def call(self: Halved, inputs: list[Any]) -> list[Any]:
            counts[name] += 1
            found: list[Any] = of[name](self, inputs)
            return found

        return call

    monkeypatch.setattr(Halved, "__call__", counted("outputs"))
    monkeypatch.setattr(Halved, "saved", counted("saved"))
    return counts


def gradients(run: Any, model: nn.Module, x_BC: Tensor) -> list[Tensor]:
    x_BC = x_BC.clone().requires_grad_()
    run(x_BC).square().mean().backward()
    return [grad for grad in (x_BC.grad, *(p.grad for p in model.parameters())) if grad is not None]


@pytest.mark.parametrize(
    ("options", "outputs", "saved"),
    [
        ({"schedule": "standard", "chunk": 1}, BLOCKS, BLOCKS),
        (
            {"schedule": "standard", "chunk": 2},
            BLOCKS + BLOCKS // 2,
            BLOCKS // 2,
        ),  # the first of two goes on from its carry
        ({"schedule": "standard", "chunk": 1, "verify": True}, 2 * BLOCKS, 0),  # carries are compared, so all are made
        ({"schedule": "store_all"}, 0, 0),  # nothing runs again, so the forward is whole
    ],
    ids=["each block", "the last of two", "verify", "store_all"],
)
def test_tapes_are_made_alone(options: dict[str, Any], outputs: int, saved: int, calls: dict[str, int]) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model, x_BC = copy.deepcopy(plain), torch.randn(64, WIDTH).double()
    run = reroll.compile(model, lowering="eager", segment=1, **options)
    found = gradients(run, model, x_BC)
    assert calls == {"outputs": outputs, "saved": saved}
    for ours, theirs in zip(found, gradients(plain, plain, x_BC), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_reversed_twice_it_is_the_same() -> None:
    torch.manual_seed(0)
    model = Net().double()
    run = reroll.compile(model, lowering="eager", segment=1, schedule="standard", chunk=1)
    loss = run(torch.randn(64, WIDTH).double()).square().mean()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=keep) for keep in (True, False))
    assert all(map(torch.equal, first, second))


@pytest.mark.inductor
def test_predicted_peak_of_a_forward_in_two_is_kept() -> None:
    torch.manual_seed(0)
    model, x_BC = WithLoss(), torch.randn(512, WIDTH)
    run = reroll.compile(model, schedule="standard", segment=1, chunk=1)

    def step() -> None:
        run(x_BC).backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = reroll.measure(step, exclude=[model]).local_peak
    predicted = reroll.explain(run, x_BC).predicted_peak
    assert predicted is not None
    assert measured <= predicted <= 1.1 * measured


class Activated(nn.Module):
    """A block whose tape holds little beside its products, and whose backward decides by them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x_BC: Tensor) -> Tensor:
        y_BC: Tensor = self.down(torch.relu(self.up(self.norm(x_BC))))
        return x_BC + y_BC


@pytest.mark.parametrize("budget", [0.5, 0.55])
def test_gradients_that_came_in_are_counted_beside_those_handed_on(budget: float) -> None:
    """The last segment is short, so that most is held while one before it is reversed."""
    torch.manual_seed(0)
    model, x_BC = nn.Sequential(*(Activated() for _ in range(7))), torch.randn(256, 32, requires_grad=True)
    torch._dynamo.reset()
    asked: dict[str, Any] = {"memory_budget": budget, "lowering": "eager", "segment": 2}
    run: Any = torch.compile(model, backend="reroll", options=asked)

    def step() -> None:
        y_BC = run(x_BC)  # held, as in most training loops
        y_BC.square().mean().backward()

    step()
    model.zero_grad(set_to_none=True)
    x_BC.grad = None
    measured = reroll.measure(step, exclude=[model, x_BC]).local_peak
    report = reroll.explain(run, x_BC)
    assert report.loops[0].choice.schedule == "revolve"
    assert measured <= report.predicted_peak + 64  # a loss is a few bytes
