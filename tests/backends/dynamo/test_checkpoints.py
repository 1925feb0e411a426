"""torch's own checkpoints in a step, of which the first or the last is run by torch: dropout in them keeps its mask."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import reroll


class Leaky(nn.Module):
    """An integrator whose input is dropped out in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)

    def forward(self, x_TBI: Tensor, v_BH: Tensor | None = None) -> Any:
        v_BH, out = x_TBI.new_zeros(x_TBI.shape[1], 6) if v_BH is None else v_BH, []
        for t in range(x_TBI.shape[0]):
            v_BH = v_BH * 0.9 + checkpoint(self.dropped, x_TBI[t], use_reentrant=False)
            out.append(torch.tanh(v_BH))
        return torch.stack(out)

    def dropped(self, x_BI: Tensor) -> Tensor:
        return torch.dropout(self.a(x_BI), 0.3, True)


@pytest.mark.variants(4)
@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("steps", [20, 2])
def test_dropout_in_a_checkpoint_has_the_gradients_of_eager(steps: int, given: bool, way: str) -> None:
    if way == "compile" and torch.__version__ < "2.12":
        pytest.skip("Where operations are recorded, checkpoints of torch 2.11 show other ones at first")
    model, x = Leaky().double(), torch.randn(steps, 3, 4).double()
    state = [torch.randn(3, 6).double()] if given else []
    options: dict[str, Any] = {"lowering": "eager"}
    backend: Any = torch.compile(model, backend="reroll", options=options)
    run = backend if way == "backend" else reroll.compile(model, time_dim={"x_TBI": 0}, **options)
    found = list[Any]()
    for each in (run, model, run):
        torch.manual_seed(5)
        with warnings.catch_warnings(action="ignore"):  # two steps are no recurrence
            out = each(x, *state)
        found.append((out.detach(), torch.autograd.grad(out.square().sum(), list(model.parameters()))))
    torch.testing.assert_close(found[2], found[1])
