"""What a call is given: it takes no memory of the program, and comes back as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import reroll

T, B, H = 40, 16, 48


class Reader(nn.Module):
    """A recurrence that reads some of its inputs, and gives them back."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h = nn.Linear(16, H), nn.Linear(H, H)

    def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
        for t in range(x_TBI.shape[0]):
            h_BH = torch.tanh(self.i(x_TBI[t, :, :16]) + self.h(h_BH))
        return h_BH, x_TBI


def peaks(inputs: int) -> tuple[int, int]:
    """Measured and predicted peak of a later call with so many inputs a step."""
    model, x = Reader(), torch.randn(T, B, inputs)
    fast = reroll.compile(model, lowering="eager", schedule="standard")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        fast(x)[0].square().sum().backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = reroll.measure(step, [model]).local_peak
    report = reroll.explain(fast, x)
    assert report.predicted_peak == sum(report.parts.values())
    return measured, report.predicted_peak


def test_what_a_call_is_given_takes_no_memory_of_the_program() -> None:
    few, wide = peaks(16), peaks(64)
    assert wide[1] - few[1] <= B * H * 4, "but for a carry the program holds no more with four times the inputs"
    assert few[0] <= few[1]
    assert wide[0] <= wide[1]


def test_what_a_model_returns_of_its_input_is_the_input() -> None:
    model, x = Reader(), torch.randn(T, B, 16, requires_grad=True)
    fast = reroll.compile(model, lowering="eager")
    for _ in range(2):
        h, same = fast(x)
        assert same is x
        h.sum().backward()
    expected = torch.autograd.grad(2 * model(x)[0].sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
