"""Networks whose values have names, and a way to build them that traces once. B batch, I inputs, H neurons, T steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

import reroll
from networks import Spike
from reroll.backends.construct.build import build
from reroll.backends.construct.replan import Plans
from reroll.backends.dynamo.entry import Graph, assemble
from reroll.backends.measure.explain import plan
from reroll.backends.runtime.node import RecurrenceModule
from reroll.capture.capture import capture
from reroll.planning.options import Options
from reroll.recurrence import Capture
from reroll.report.report import Loop

B, I, H = 3, 5, 7  # noqa: E741
STEPS, SEGMENT = 6, 2
EAGER: dict[str, Any] = {"lowering": "eager", "segment": SEGMENT, "schedule": "standard", "chunk": SEGMENT}
ROW = B * H * 8  # bytes of a float64 value


class Net(nn.Module):
    """Two layers into the state, ``gates`` times as wide, and readouts that are added up."""

    def __init__(self, gates: int = 1) -> None:
        super().__init__()
        self.i, self.h, self.o = nn.Linear(I, gates * H), nn.Linear(H, gates * H), nn.Linear(H, 2)


class Tanh(Net):
    """The result of the second name is not used: it names the value all the same."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(B, H)
        for x_BI in x_TBI:
            pre_BH = reroll.name(self.i(x_BI) + self.h(h_BH), "pre")
            h_BH = torch.tanh(pre_BH)
            reroll.name(h_BH, "hidden")
        return h_BH


class Lstm(Net):
    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, c_BH, total_BH = (x_TBI.new_zeros(B, H) for _ in range(3))
        for x_BI in x_TBI:
            gates = reroll.name(self.i(x_BI) + self.h(h_BH), "gates")
            i_BH, f_BH, g_BH, o_BH = gates.chunk(4, 1)
            c_BH = reroll.name(f_BH.sigmoid() * c_BH + i_BH.sigmoid() * g_BH.tanh(), "cell")
            h_BH = o_BH.sigmoid() * c_BH.tanh()
            total_BH = total_BH + h_BH
        return total_BH


class Lif(Net):
    def forward(self, x_TBI: Tensor) -> Tensor:
        v_BH, z_BH, total = x_TBI.new_zeros(B, H), x_TBI.new_zeros(B, H), x_TBI.new_zeros(B, 2)
        for x_BI in x_TBI:
            v_BH = reroll.name(0.9 * v_BH * (1 - z_BH) + self.i(3 * x_BI) + self.h(z_BH), "v")
            z_BH = reroll.name(Spike.apply(v_BH), "z")  # type: ignore[no-untyped-call]
            total = total + self.o(z_BH)
        return total


class Peak(Net):
    """The largest value of a row, which has an index; eager's backward reads the index."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(B, H)
        for x_BI in x_TBI:
            h_BH = torch.tanh(self.i(x_BI) + self.h(h_BH))
            h_BH = h_BH * h_BH.max(1, keepdim=True).values.cos()
        return h_BH


class Odd(nn.Module):
    """In-place updates, a delay of two steps, noise, a softmax of a layer norm, names of views, inputs, weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.i = nn.Parameter(0.4 * torch.randn(H, H)), nn.Linear(I, H)
        self.norm, self.g = nn.LayerNorm(H), nn.Linear(4, H, bias=False)

    def forward(self, x_TBI: Tensor) -> Tensor:
        a_BH = b_BH = x_TBI.new_zeros(B, H)
        out_TBH = x_TBI.new_zeros(x_TBI.shape[0], B, H)
        for t in range(x_TBI.shape[0]):
            u_BH = a_BH @ reroll.name(self.w, "weight")
            u_BH.add_(reroll.name(self.i(reroll.name(x_TBI[t], "input")), "drive"))
            u_BH = reroll.name(u_BH, "sum")
            u_BH.mul_(0.5)
            noise_BH = reroll.name(torch.rand_like(u_BH), "noise")
            k_BH = reroll.name(reroll.name(torch.softmax(self.norm(u_BH + b_BH), -1), "k"), "also k")
            half = reroll.name(k_BH[:, :4], "half")
            a_BH, b_BH = b_BH, torch.tanh(self.g(half.relu()) * noise_BH) + k_BH
            out_TBH[t] = b_BH
        return out_TBH


class Twins(nn.Module):
    """Two loops that differ in the name of a value only; the second goes backwards, so that they are not fused."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Linear(I, I)

    def forward(self, x_TBI: Tensor) -> Tensor:
        for text in ("first", "second"):
            h_BI, rows = torch.zeros_like(x_TBI[0]), []
            for x_BI in x_TBI:
                h_BI = torch.tanh(reroll.name(self.h(h_BI) + x_BI, text))
                rows.append(h_BI)
            x_TBI = torch.stack(rows[::-1])
        return x_TBI


def sequence(steps: int = STEPS) -> Tensor:
    return torch.randn(steps, B, I)


@dataclass(frozen=True)
class Captured:
    """A network that Dynamo has traced once: its graph, with the operands, what was captured, and eager's results."""

    module: fx.GraphModule
    operands: Sequence[Any]
    found: Capture
    expected: Sequence[Tensor]

    @classmethod
    @functools.cache
    def of(cls, make: Callable[[], nn.Module]) -> Captured:
        seen: list[Any] = []

        def keep(gm: fx.GraphModule, _: Any) -> Any:
            def run(*operands: Any) -> Any:
                seen.append((gm, operands))
                return gm(*operands)

            return run

        torch.manual_seed(0)
        model, x_TBI = make(), sequence().requires_grad_()
        torch.manual_seed(1)
        expected = torch.compile(model, backend=keep, fullgraph=True)(x_TBI)
        ((module, operands),) = seen
        return cls(module, operands, capture(module), cls.gradients(expected, operands))

    @staticmethod
    def gradients(result: Tensor, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.autograd.grad(result.square().sum(), [each for each in operands if each.requires_grad])

    def run(self, **options: Any) -> tuple[Loop, float]:
        """The report on the loop, and the largest relative error of a gradient."""
        (recurrence,) = self.found.recurrences
        built = build(recurrence, Options(**EAGER | options))
        module = assemble(self.module, self.found.outer, {recurrence.name: RecurrenceModule(built.executable)})
        torch.manual_seed(1)
        got = self.gradients(module(*self.operands)[0], self.operands)
        pairs = zip(got, self.expected, strict=True)
        return plan(Graph(module, module, Plans((built,)))).loops[0], max(
            float((a - b).norm() / b.norm()) for a, b in pairs
        )
