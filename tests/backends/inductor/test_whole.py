"""Graphs that are left to torch's inductor: nobody's inputs are written into."""

import pytest
import torch
from torch import Tensor

import reroll


def alternating(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows in turn, stacked, and a chain over them from zeros: torch 2.13 wrote into the first row."""
    h = torch.zeros(3, 4, dtype=x.dtype)
    rows, states = list[Tensor](), list[Tensor]()
    for t in range(0, x.shape[0], 2):
        row = rows[-2] if len(rows) > 1 else x[t]
        h = torch.tanh(h + row)
        rows.append(row)
        states.append(h)
    return h, torch.stack(rows, 1), torch.stack(states).flip(0)


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:reroll found no recurrence")
def test_the_backward_of_a_graph_that_is_left_to_torch_leaves_inputs_alone() -> None:
    x = torch.randn(9, 3, 4, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    model = torch.compile(alternating, backend="reroll", options={"lowering": "inductor"})
    torch.stack([each.square().mean() for each in model(x)]).sum().backward()
    assert torch.equal(x, before)
    reroll.check(model, x, strict=True, measure=False)
