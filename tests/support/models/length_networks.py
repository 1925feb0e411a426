"""Networks for ``reroll.compile``: a cell, and what is made of its states (T steps, B batch, I in, H neurons)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from agreement import differences, results

I, H = 4, 6  # noqa: E741
EAGER: dict[str, Any] = {"lowering": "eager", "segment": 2}
DOUBLE: dict[str, Any] = {**EAGER, "schedule": "double", "chunk": 9, "slots": 3, "remote": "disk"}


class Net(nn.Module):
    """A tanh cell under a function that says what is made of its states; ``body`` may be any of the functions below."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.cell, self.out = nn.RNNCell(I, H), nn.Linear(H, 2)
        self.drop = nn.Dropout(0.3)
        self.scale: float = 1.0
        self.last: Tensor | None = None
        self.history: list[Tensor] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def states(net: Net, x_TBI: Tensor) -> list[Tensor]:
    h_BH, found = x_TBI.new_zeros(x_TBI.shape[1], H), []
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[t], h_BH)
        found.append(h_BH)
    return found


def last(net: Net, x_TBI: Tensor) -> Any:
    return states(net, x_TBI)[-1] * net.scale


def stacked(net: Net, x_TBI: Tensor) -> Any:
    return net.out(torch.stack(states(net, x_TBI)))


def rows(net: Net, x_TBI: Tensor) -> Any:
    h = states(net, x_TBI)
    return {"all": h, "some": (h[0], h[-2:]), "pairs": [(a, 2 * a) for a in h], "steps": len(h), "x": x_TBI}


def over_steps(net: Net, x_TBI: Tensor) -> Any:
    total = x_TBI.new_zeros(x_TBI.shape[1], H)
    for h in states(net, x_TBI):
        total = total + h / x_TBI.shape[0]
    return total, sum(states(net, x_TBI)) / x_TBI.shape[0] ** 0.5


def flattened(net: Net, x_TBI: Tensor) -> Any:
    steps, batch, _ = x_TBI.shape
    return torch.tanh(net.out(torch.stack(states(net, x_TBI)).view(steps * batch, H))).view(steps, batch, 2).mean(0)


def positions(net: Net, x_TBI: Tensor) -> Any:
    return stacked(net, x_TBI + torch.arange(x_TBI.shape[0])[:, None, None] / x_TBI.shape[0])


def time_numbers(net: Net, x_TBI: Tensor) -> Any:
    h_BH, loss = x_TBI.new_zeros(x_TBI.shape[1], H), x_TBI.new_zeros(())
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[t] * (1 + t / x_TBI.shape[0]), h_BH)
        loss = loss + h_BH.pow(2).mean() * 0.9 ** (x_TBI.shape[0] - t)
    return loss


def dropped(net: Net, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for t in range(x_TBI.shape[0]):
        h_BH = net.drop(net.cell(x_TBI[t], h_BH))
    net.last = h_BH.detach()
    return h_BH, torch.rand(3)


def backwards(net: Net, x_TBI: Tensor) -> Any:
    forth, back = states(net, x_TBI), states(net, x_TBI.flip(0))[::-1]
    return torch.stack([torch.cat([a, b], -1) for a, b in zip(forth, back, strict=True)])


def every_other(net: Net, x_TBI: Tensor) -> Any:
    return torch.stack(states(net, x_TBI)[::2]), states(net, x_TBI[1::2])[-1]


def detached(net: Net, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[t], h_BH.detach() if t % 4 == 0 else h_BH)
    return h_BH


def interleaved(net: Net, x_TBI: Tensor) -> Any:
    h_BH, found = x_TBI.new_zeros(x_TBI.shape[1], H), []
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[t], h_BH)
        found += [h_BH, -h_BH] if t % 3 == 1 else [h_BH]
    return torch.cat(found, 1), torch.stack(tensors=found)


def late(net: Net, x_TBI: Tensor) -> Any:
    return torch.stack(states(net, x_TBI)[12:])


def masked(net: Net, batch: dict[str, Any], h_BH: Tensor, *, gain: float = 1.0) -> Any:
    x_BTI, (mask_TB, labels_B) = batch["x"], batch["rest"]
    for t in range(x_BTI.shape[1]):
        h_BH = net.cell(x_BTI[:, t], h_BH * gain) * mask_TB[t, :, None]
    return h_BH, labels_B + 1


def detach_late(net: Net, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[t], h_BH.detach() if t % 40 == 39 else h_BH)
    return h_BH


def stuck_index(net: Net, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[min(t, 45)], h_BH)
    return h_BH


def other_surrogate(net: Net, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for t in range(x_TBI.shape[0]):
        h_BH = (Steep if t > 25 else Flat).apply(net.cell(x_TBI[t], h_BH))  # type: ignore[no-untyped-call]
    return h_BH


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return u.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 0.5 * grad


class Steep(Flat):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def late_rows(net: Net, x_TBI: Tensor) -> Any:
    return states(net, x_TBI)[30:]


def turned(net: Net, x_TBI: Tensor) -> Any:
    found = states(net, x_TBI)
    return torch.stack(found[::-1] if len(found) > 25 else found)


def later_scale(net: Net, x_TBI: Tensor) -> Any:
    return states(net, x_TBI)[-1] * (1 + x_TBI.shape[0] // 30)


def growing_attribute(net: Net, x_TBI: Tensor) -> Any:
    net.history = states(net, x_TBI)
    return net.history[-1]


def counted(net: Net, x_TBI: Tensor) -> Any:
    net.scale = net.scale + x_TBI.shape[0]
    return last(net, x_TBI)


def kept_input(net: Net, x_TBI: Tensor) -> Any:
    net.last = x_TBI
    return last(net, x_TBI)


def agree(net: Net, run: Any, twin: Net, x_TBI: Tensor) -> None:
    different = differences(results(run, twin, (x_TBI,)), results(net, net, (x_TBI,)), 1e-11)
    assert not different, f"at {x_TBI.shape[0]} steps: {different}"
