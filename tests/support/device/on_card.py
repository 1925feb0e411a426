"""Models, doors and comparisons of tests that run on a card: all with eager autograd of the same device.

Shape letters: T steps, B batch, I inputs, H neurons.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import reroll
from agreement import Results, differences, results
from networks import RecurrentLIF

B, I, H = 4, 6, 8  # noqa: E741
SINGLE, DOUBLE = 1e-4, 1e-9  # relative to the largest entry of each gradient, in float32 and in float64
ROUNDED = {torch.float32: 3e-5, torch.float64: 1e-12}  # what a backward's recording may differ by

SEGMENTS: dict[str, Any] = {"segment": 3, "lowering": "inductor"}
RECORDED: dict[str, dict[str, Any]] = {
    "store_all": {"schedule": "store_all"},
    "standard": {"schedule": "standard", "chunk": 6},
    "double": {"schedule": "double", "chunk": 6, "slots": 2, "remote": "host"},
}


class Tanh(nn.Module):
    """A cell of one state."""

    def __init__(self, inputs: int, neurons: int) -> None:
        super().__init__()
        self.read, self.back = nn.Linear(inputs, neurons), nn.Linear(neurons, neurons, bias=False)

    def forward(self, x_BI: Tensor, h_BH: Tensor) -> Tensor:
        return torch.tanh(self.read(x_BI) + self.back(h_BH))


class Looped(nn.Module):
    """A loop over a cell, with a readout of every step and of the last state. ``p``: dropout of states."""

    def __init__(
        self, cell: Callable[[int, int], nn.Module], p: float = 0.0, noise: float = 0.0, width: int = H, inputs: int = I
    ) -> None:
        super().__init__()
        self.cell, self.out = cell(inputs, width), nn.Linear(width, 3)
        self.p, self.noise, self.width = p, noise, width

    def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
        h_BH = c_BH = x_TBI.new_zeros(x_TBI.shape[1], self.width)
        rows = []
        for t in range(x_TBI.shape[0]):
            if isinstance(self.cell, nn.LSTMCell):
                h_BH, c_BH = self.cell(x_TBI[t], (h_BH, c_BH))
            else:
                h_BH = self.cell(x_TBI[t], h_BH)
            if self.p:
                h_BH = nn.functional.dropout(h_BH, self.p, self.training)
            if self.noise:
                h_BH = h_BH + self.noise * torch.bernoulli(torch.full_like(h_BH, 0.4))
            rows.append(self.out(h_BH))
        return torch.stack(rows), h_BH


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Looped(nn.LSTMCell),
    "gru": lambda: Looped(nn.GRUCell),
    "tanh": lambda: Looped(Tanh),
    "lif": lambda: RecurrentLIF(I, H, 3, mean=False),
}


def through_compile(model: nn.Module, **options: Any) -> Any:
    """``reroll.compile``; time is the first dimension."""
    return reroll.compile(model, **options)


def through_backend(model: nn.Module, **options: Any) -> Any:
    """``torch.compile``."""
    return torch.compile(model, backend="reroll", fullgraph=True, options=options)


DOORS: dict[str, Callable[..., Any]] = {"compile": through_compile, "backend": through_backend}


def sequence(card: torch.device, steps: int, dtype: torch.dtype = torch.float64, batch: int = B) -> Tensor:
    """Inputs that drive spikes, too."""
    drawn = 4 * (torch.rand(steps, batch, I) < 0.4) + 0.1 * torch.randn(steps, batch, I)
    return drawn.to(card, dtype)


def agrees(
    model: nn.Module,
    compiled: Callable[[nn.Module], Any],
    inputs: Iterable[tuple[Tensor, ...]],
    tolerance: float = DOUBLE,
) -> Any:
    """Compare outputs, gradients and buffers with those of eager, call by call. Gives what was compiled."""
    twin = copy.deepcopy(model)
    run = compiled(twin)
    for given in inputs:
        expected, found = results(model, model, given), results(run, twin, given)
        assert sum(bool(value.any()) for value in expected.values()) > len(expected) / 2, "nothing to compare"
        different = differences(found, expected, tolerance)
        assert not different, (tuple(each.shape for each in given), different)
    return run


def trained(run: Any, model: nn.Module, inputs: Sequence[Tensor]) -> Results:
    """Outputs and gradients of every step of a training, and the weights behind it."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), Results()
    torch.manual_seed(3)
    for step, x_TBI in enumerate(inputs):
        optimizer.zero_grad()
        x_TBI = x_TBI.clone().requires_grad_()
        out = run(x_TBI)
        outputs = out if isinstance(out, tuple) else (out,)
        torch.stack([each.square().sum() for each in outputs]).sum().backward()
        named = [("input", x_TBI), *model.named_parameters()]
        found |= {f"{name} {step}": each.grad.clone() for name, each in named if each.grad is not None}
        found |= {f"output {n} {step}": each.detach().clone() for n, each in enumerate(outputs)}
        optimizer.step()
    return found | {name: each.detach().clone() for name, each in model.named_parameters()}


def trained_both(
    model: nn.Module, inputs: Sequence[Tensor], options: dict[str, Any], door: str = "compile"
) -> list[Results]:
    """A training with recordings, and without."""
    found = []
    for recorded in (True, False):
        twin = copy.deepcopy(model)
        run = DOORS[door](twin, **{**SEGMENTS, **options, "cuda_graphs": recorded})
        found.append(trained(run, twin, inputs))
    return found


def agree_up_to_rounding(recorded: Results, launched: Results, dtype: torch.dtype) -> None:
    """The first outputs of two trainings are the same bits, and all else is as near as docs/gpus.md promises: a
    backward may add up in another order while it is recorded, and later steps have weights that are made of that."""
    first = [name for name in recorded if name.startswith("output ") and name.endswith(" 0")]
    assert first
    assert not differences({name: recorded[name] for name in first}, {name: launched[name] for name in first}, 0.0)
    assert not differences(recorded, launched, ROUNDED[dtype])
