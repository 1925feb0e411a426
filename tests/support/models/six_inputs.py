"""A recurrence with every kind of input, made by hand."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from reroll.recurrence import Items, Numbers, Recurrence, Slices

STEPS = 4
SEQUENCE, ITEMS, WEIGHT = 2, (3, 4, 5, 3), 6
"""Operands: carries are 0 and 1; the item of the first step is read at the last one too."""


def six_inputs() -> Recurrence:
    """Two carries, the rows of a sequence from its end on, a list, numbers and a constant."""

    def step(h_B: Tensor, c_B: Tensor, x_B: Tensor, item_B: Tensor, number: Tensor, weight_B: Tensor) -> object:
        made = h_B * weight_B + x_B
        return made, c_B + item_B * number, made + c_B

    shapes = [(3,), (3,), (STEPS, 3), (3,), (3,), (3,), (3,)]
    return Recurrence(
        name="loop",
        step=fx.symbolic_trace(step),
        steps=STEPS,
        carries=("h_B", "c_B"),
        xs=(Slices(SEQUENCE, 0, STEPS - 1, -1), Items(ITEMS), Numbers((1.0, 2.0, 3.0, 4.0))),
        constants=(WEIGHT,),
        ys=("add",),
        examples=tuple(torch.zeros(shape, requires_grad=True) for shape in shapes),
    )


def operands() -> list[Tensor]:
    """Values for it, all different."""
    counted = 0
    found = []
    for like in six_inputs().examples:
        found.append(torch.arange(counted, counted + like.numel(), dtype=torch.float32).reshape(like.shape))
        counted += like.numel()
    return found
