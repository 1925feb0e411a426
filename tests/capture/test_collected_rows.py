"""Rows of a loop that are stacked, concatenated or read one by one lie in memory as eager's: a dropout behind them
draws the same mask, and strides are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import reroll
from agreement import QUICK

T = 6
Behind = Callable[[list[Tensor]], Any]


def plain_first(rows: list[Tensor]) -> Tensor:
    return dropout(torch.stack([rows[0].contiguous(), *rows[1:]]))


def second_loop(rows: list[Tensor]) -> Tensor:
    g, made = 0 * rows[0], []
    for row in rows:
        g = torch.tanh(dropout(row, 0.5) + 0.5 * g)
        made.append(g)
    return torch.stack(made)


IMAGES: dict[str, Behind] = {
    "stack": lambda rows: dropout(torch.stack(rows)),
    "stack behind the batch": lambda rows: dropout(torch.stack(rows, 1)),
    "stack last": lambda rows: dropout(torch.stack(rows, -1)),
    "view": lambda rows: torch.stack(rows).permute(0, 1, 3, 4, 2).view(T, 2, -1),
    "cat": lambda rows: dropout(torch.cat(rows)),
    "cat channels": lambda rows: dropout(torch.cat(rows, 1)),
    "some": lambda rows: [dropout(torch.stack(rows[::2])), torch.stack(rows[::-1]), torch.stack(rows)[2:]],
    "list": lambda rows: [*rows, *map(dropout, rows)],
    "one of another layout": plain_first,
    "another loop": second_loop,
    "readout": lambda rows: dropout(torch.stack(rows).mean(-1, keepdim=True) * 2),
}
VECTORS: dict[str, Behind] = {
    "turned": lambda rows: [dropout(torch.stack([row.t() for row in rows], dim)) for dim in (0, 1, -1)],
    "turned alone": lambda rows: [dropout(row.t()) for row in rows],
    "expanded": lambda rows: dropout(torch.stack([row[:, :1].expand(3, 4) for row in rows])),
}


class Images(nn.Module):
    """Convolutions whose weights are channels_last, as is what they give."""

    def __init__(self, behind: Behind, kind: type[nn.Conv2d] | type[nn.Conv3d] = nn.Conv2d) -> None:
        super().__init__()
        self.behind, self.ahead, self.around = behind, kind(2, 3, 3, padding=1), kind(3, 3, 3, padding=1)
        self.to(memory_format=torch.channels_last if kind is nn.Conv2d else torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Any:
        h, rows = torch.tanh(self.ahead(x[0])), []
        for t in range(x.shape[0]):
            h = torch.tanh(self.ahead(x[t]) + self.around(h))
            rows.append(h)
        return self.behind(rows)


class Vectors(nn.Module):
    """A small recurrent network."""

    def __init__(self, behind: Behind) -> None:
        super().__init__()
        self.behind, self.cell = behind, nn.RNNCell(4, 5)

    def forward(self, x_TBI: Tensor) -> Any:
        h, rows = x_TBI.new_zeros(3, 5), []
        for t in range(x_TBI.shape[0]):
            h = self.cell(x_TBI[t], h)
            rows.append(h)
        return self.behind(rows)


def played(run: Callable[..., Any], model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients with the next random number."""
    torch.manual_seed(1)
    model.zero_grad()
    made = run(x)
    outputs = made if isinstance(made, list) else [made]
    torch.stack([output.square().sum() for output in outputs]).sum().backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.detach() for each in outputs], [*grads, torch.rand(())]


def check(model: nn.Module, x: Tensor, run: Callable[..., Any]) -> None:
    """Outputs with their strides, gradients and random numbers are those of eager."""
    (outputs, grads), (expected, expected_grads) = played(run, model, x), played(model, model, x)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12, check_stride=True)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", [*IMAGES, *VECTORS])
def test_rows_lie_as_eagers(name: str, double_precision: None) -> None:
    images = name in IMAGES
    model = Images(IMAGES[name]) if images else Vectors(VECTORS[name])
    check(
        model,
        torch.randn(T, 2, 2, 4, 4) if images else torch.randn(T, 3, 4),
        torch.compile(model, backend="reroll", options=QUICK),
    )


def test_rows_lie_as_eagers_at_every_length_and_with_three_dimensions(double_precision: None) -> None:
    model = Images(IMAGES["cat channels"], nn.Conv3d)
    run = reroll.compile(model, **QUICK)
    for steps in (T, T + 3):
        check(model, torch.randn(steps, 2, 2, 3, 3, 3), run)


class ChannelsLast(nn.Module):
    """Each step reads its image position by position: ``view`` is legal there, as its image is channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> list[Tensor]:
        h, rows = x[0, :, :1], []
        for x_BCHW in x:
            y = self.conv((0.5 * h + x_BCHW).contiguous(memory_format=torch.channels_last)).tanh()
            y = y.permute(0, 2, 3, 1).view(-1, 2).sin().view(2, 4, 4, 2).permute(0, 3, 1, 2)
            h = y.mean(1, keepdim=True)
            rows.append(y)
        return [torch.stack(rows), h]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_gradients_of_rows_are_traced_as_they_arrive(lowering: str, double_precision: None) -> None:
    run = torch.compile(model := ChannelsLast(), backend="reroll", options={"lowering": lowering, "segment": 1})
    check(model, torch.randn(T, 2, 2, 4, 4), run)
