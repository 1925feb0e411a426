"""A loss beside a model: a function of both, of which nothing is held for all steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll
from pairs import spike
from reroll.errors import OptionError, UnsupportedError

T, B, N = 12, 3, 4
pytestmark = pytest.mark.usefixtures("double_precision")


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


class Net(nn.Module):
    def __init__(self, num_steps: int = T) -> None:
        super().__init__()
        self.rnn, self.readout, self.num_steps = nn.GRU(N, N), nn.Linear(N, 2), num_steps

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        return self.readout(self.rnn(x, h)[0])  # type: ignore[no-any-return]


class Counted(Net):
    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        v, found = x.new_zeros(B, N), []
        for _ in range(self.num_steps):
            v = torch.tanh(v * 0.9 + x)
            found.append(self.readout(v))
        return torch.stack(found)


def gradients(value: Tensor, model: nn.Module) -> list[Tensor | None]:
    return list(torch.autograd.grad(value, [*model.parameters()], allow_unused=True, retain_graph=True))


def same(found: Tensor, expected: Tensor, model: nn.Module) -> bool:
    pairs = zip(gradients(found, model), gradients(expected, model), strict=True)
    grads = all(a is b is None or (a is not None and b is not None and torch.allclose(a, b)) for a, b in pairs)
    return torch.allclose(found, expected) and grads


def test_a_loss_is_part_of_the_step() -> None:
    model, x, target = Net(), torch.randn(T, B, N), torch.randn(T, B, 2)
    fast = reroll.compile(model, loss=mean_square, lowering="eager")
    assert same(fast(x, target=target), mean_square(model(x), target), model)
    (loop,) = reroll.explain(fast, x, target=target).loops
    assert not loop.recurrence.ys
    assert reroll.check(fast, x, target=target, measure=False).equal


def test_other_arguments_stay_the_models() -> None:
    model, x, target, h = Net(), torch.randn(T, B, N), torch.randn(T, B, 2), torch.randn(1, B, N)
    fast = reroll.compile(model, loss=mean_square, lowering="eager")
    expected = mean_square(model(x, h), target)
    assert same(fast(x, h, target=target), expected, model)
    assert same(fast(x, h=h, target=target), expected, model)
    assert same(fast(h=h, target=target, x=x), expected, model)


def test_targets_without_time() -> None:
    model, x, target = Net(), torch.randn(T, B, N), torch.tensor([0, 1, 1])
    fast = reroll.compile(model, loss=lambda y, t: F.cross_entropy(y.mean(0), t), lowering="eager")
    assert same(fast(x, target=target), F.cross_entropy(model(x).mean(0), target), model)
    assert not reroll.explain(fast, x, target=target).loops[0].recurrence.ys


def test_a_number_of_steps_is_still_the_models() -> None:
    model, x, target = Counted(), torch.randn(B, N), torch.randn(T, B, 2)
    fast = reroll.compile(model, loss=mean_square, lowering="eager")
    assert same(fast(x, target=target), mean_square(model(x), target), model)
    assert model.num_steps == T


def test_a_decorator_with_a_loss() -> None:
    model, x, target = Net(), torch.randn(T, B, N), torch.randn(T, B, 2)

    @reroll.compile(loss=mean_square, lowering="eager")
    def fast(x: Tensor) -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    assert same(fast(x, target=target), mean_square(model(x), target), model)


def test_a_loss_over_depth() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(N, N), nn.Tanh()) for _ in range(6)))
    fast = reroll.compile(model, loss=mean_square, lowering="eager")
    x, target = torch.randn(B, N), torch.randn(B, N)
    assert same(fast(x, target=target), mean_square(model(x), target), model)
    assert reroll.explain(fast, x, target=target).loops


def test_bad_losses() -> None:
    model, x, target = Net(), torch.randn(T, B, N), torch.randn(T, B, 2)
    with pytest.raises(OptionError, match="int as loss, which cannot be called"):
        reroll.compile(model, loss=3)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="str as model"):
        reroll.compile("model", loss=mean_square)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="has a parameter of that name"):
        reroll.compile(lambda x, target: x, loss=mean_square)
    with pytest.raises(OptionError, match="takes the target by name"):
        reroll.compile(model, loss=mean_square)(x, target)  # type: ignore[call-arg]
    vector = reroll.compile(model, loss=lambda y, t: y.sum((0, 1)), lowering="eager")
    with pytest.raises(UnsupportedError, match=r"returned a tensor of shape \[2\], not one number"):
        vector(x, target=target)
    nothing = reroll.compile(model, loss=lambda y, t: (y.sum(), t), lowering="eager")
    with pytest.raises(UnsupportedError, match="returned tuple, not one number"):
        nothing(x, target=target)


class Spiking(nn.Module):
    """Gives spikes and potentials of all steps, as networks of snnTorch do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(N, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v, u = x.new_zeros(B, 8), x.new_zeros(B, 5)
        spikes: list[Tensor] = []
        potentials: list[Tensor] = []
        for t in range(x.shape[0]):
            v = 0.9 * v + self.fc(x[t])
            fired = spike(v - 0.1)
            u = 0.9 * u + self.out(fired)
            spikes.append(spike(u - 0.1))
            potentials.append(u)
        return torch.stack(spikes), torch.stack(potentials)


def step_by_step(found: Any, target: Tensor) -> Any:
    total: Any = 0.0
    for potential in found[1]:
        total = total + F.cross_entropy(potential, target)
    return total


def by_rate(found: Any, target: Tensor) -> Any:
    return F.cross_entropy(found[0].sum(0), target) + 1e-3 * found[0].mean()


def by_count(found: Any, target: Tensor) -> Any:
    return F.mse_loss(found[0].mean(0), F.one_hot(target, 5).to(found[0].dtype))


@pytest.mark.parametrize("loss", [step_by_step, by_rate, by_count])
def test_losses_of_spiking_networks_hold_nothing_of_all_steps(loss: Any) -> None:
    model, x, target = Spiking(), torch.rand(T, B, N), torch.randint(5, (B,))
    fast = reroll.compile(model, loss=loss, lowering="eager")
    assert same(fast(x, target=target), loss(model(x), target), model)
    (loop,) = reroll.explain(fast, x, target=target).loops
    assert not loop.recurrence.ys
