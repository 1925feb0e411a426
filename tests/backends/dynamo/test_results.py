"""Results of a loop are as in eager beside their values: layouts, and which of them need gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll

D = torch.float64
PICKS: dict[str, Callable[[list[Tensor]], Any]] = {
    "all": tuple,
    "every other": lambda rows: torch.stack(rows[::2]).view(-1),
    "every other, from behind": lambda rows: torch.stack(rows[::-2]).view(-1),
    "every third along another dimension": lambda rows: torch.stack(rows[::3], 1).view(-1),
    "every other, read": lambda rows: list(rows[::2]),
}


class FromConstants(nn.Module):
    """A carry that begins as a constant: what the first step gives needs no gradient, all later rows do."""

    def __init__(self, pick: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.weight, self.pick = nn.Parameter(torch.randn(4, 4) / 2), pick

    def forward(self, x: Tensor) -> tuple[Any, Tensor]:
        h, rows = torch.ones(3, 4, dtype=x.dtype), []
        for t in range(x.shape[0]):
            rows.append(h * 0.5)
            h = 0.9 * h + torch.tanh(x[t] @ self.weight)
        return self.pick(rows), h


@pytest.mark.variants(4)
@pytest.mark.parametrize("door", ["backend", "compile"])
@pytest.mark.parametrize("pick", PICKS)
def test_layouts_and_who_needs_gradients(pick: str, door: str) -> None:
    torch.manual_seed(0)
    net, x = FromConstants(PICKS[pick]).to(D), torch.randn(11, 3, 4, dtype=D)
    if door == "backend":
        model: Any = torch.compile(net, backend="reroll", options={"lowering": "eager"})
    else:
        model = reroll.compile(net, lowering="eager")
    reroll.check(model, x, strict=True, measure=False)


def folded(rows: list[Tensor]) -> Tensor:
    """A second loop over the rows, the last one first."""
    h = torch.zeros_like(rows[0])
    for row in rows[::-1]:
        h = torch.cos(0.5 * h + row)
    return h


class ReadDetached(nn.Module):
    """What is read of detached states needs no gradient; the last state needs one, and is made by the same operation.

    ``reroll.compile`` takes all of these operations as one loop that carries nothing.
    """

    def __init__(self, pick: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.start, self.weight = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 4) / 2)
        self.pick = pick

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        h: Tensor = self.start
        states: list[Tensor] = []
        for t in range(x.shape[0]):
            states.append(h.detach())
            h = torch.tanh(h @ self.weight + x[t])
        return h, self.pick([torch.tanh(state) for state in states])


DETACHED: dict[str, Callable[[list[Tensor]], Any]] = {
    "stacked": torch.stack,
    "some, from behind, along another dimension": lambda rows: torch.cat(rows[-2:1:-1], 1),
    "every other": lambda rows: torch.stack(rows[::2]),
    "one by one": list,
    "a second loop": folded,
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("pick", DETACHED)
def test_rows_without_gradients_beside_one_with(pick: str) -> None:
    torch.manual_seed(0)
    net, x = ReadDetached(DETACHED[pick]).to(D), torch.randn(9, 3, 4, dtype=D, requires_grad=True)
    reroll.check(reroll.compile(net, lowering="eager"), x, strict=True, measure=False)


class Sparse(nn.Module):
    """Weights that are mostly zeros, held as such, and a count."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        dense = torch.eye(4, dtype=D) + torch.eye(4, dtype=D).roll(1, 0)
        self.register_buffer("links", getattr(dense, f"to_sparse_{kind}")())
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=D) / 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(4, 3)
        for t in range(x.shape[0]):
            h = torch.tanh(torch.sparse.mm(self.links, h) + self.weight @ x[t])
        return h


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_sparse_weights(kind: str) -> None:
    net, x = Sparse(kind), torch.randn(9, 4, 3, dtype=D)
    # Dynamo leaves it as it is
    reroll.check(torch.compile(net, backend="reroll"), x, strict=True, measure=False)
    with pytest.raises(reroll.UnsupportedError, match="holds or is given a sparse tensor"):
        reroll.compile(net)(x)


class Statistics(nn.Module):
    """Running statistics that a function updates by default, without being asked to."""

    def __init__(self, norm: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.weight = norm, nn.Parameter(torch.randn(5, 5) / 2)
        self.mean: Tensor
        self.var: Tensor
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(3, 4, 5)
        for t in range(x.shape[0]):
            h = torch.tanh(self.norm(x[t] + h @ self.weight, self.mean, self.var))
        return h


def native(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    found: Tensor = torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)[0]
    return found


@pytest.mark.parametrize("door", ["backend", "compile"])
def test_statistics_that_are_updated_by_default(door: str) -> None:
    x = torch.randn(9, 3, 4, 5, dtype=D)

    def compiled(norm: Callable[..., Tensor]) -> Any:
        net = Statistics(norm).to(D)
        if door == "backend":
            return torch.compile(net, backend="reroll", options={"lowering": "eager"})
        return reroll.compile(net, lowering="eager")

    reroll.check(compiled(nn.functional.instance_norm), x, strict=True, measure=False)
    with pytest.raises(reroll.CaptureError, match=r"updates a tensor.*nothing says so.*torch\.nn"):
        compiled(native)(x)


class Detached(nn.Module):
    """A row that begins detached, and gets a gradient by an update in place."""

    def __init__(self, copied: bool, read: bool = False) -> None:
        super().__init__()
        self.weight, self.copied, self.read = nn.Parameter(torch.randn(4, 4) / 2), copied, read

    def forward(self, x: Tensor) -> Tensor:
        h, rows = x.new_ones(3, 4), []
        for t in range(x.shape[0]):
            row = h.detach()
            zeros = torch.zeros_like(row)
            row = row.clone() if self.copied else row * 1 if t % 2 else zeros.detach()
            row += h @ self.weight
            rows.append(row + zeros if self.read else row)
            h = 0.9 * h + x[t]
        return torch.stack(rows)


def test_updates_of_what_was_detached_keep_their_gradients() -> None:
    x = torch.randn(12, 3, 4, dtype=D)
    copied, net = Detached(copied=True).to(D), Detached(copied=False, read=True).to(D)
    reroll.check(reroll.compile(copied, lowering="eager"), x, strict=True, measure=False)
    reroll.check(reroll.compile(Detached(copied=False).to(D), lowering="eager"), x, strict=True, measure=False)
    for run in (reroll.compile(net, lowering="eager"), torch.compile(net, backend="reroll")):
        with pytest.warns(reroll.RerollWarning, match=r"what detach\(\) gave is updated in place"):
            reroll.check(run, x, strict=True, measure=False)
