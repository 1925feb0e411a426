"""Sizes of what is made inside of a loop over time: short sequences take other rows than long ones, or all of them.

What a step makes of the sequence is eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll

Form = Callable[[Tensor, int], Tensor]
FORMS: dict[str, Form] = {
    "x.chunk(10)[0].sum(0)": lambda x, t: x.chunk(10)[0].sum(0),
    "x.chunk(4)[-1].sum(0)": lambda x, t: x.chunk(4)[-1].sum(0),
    "x.chunk(3)[1].mean(0)": lambda x, t: x.chunk(3)[1].mean(0),
    "x.chunk(10)[t % 3].sum(0)": lambda x, t: x.chunk(10)[t % 3].sum(0),
    "x.chunk(2)[0][-1]": lambda x, t: x.chunk(2)[0][-1],
    "x.chunk(2)[1][0]": lambda x, t: x.chunk(2)[1][0],
    "x[::10][0]": lambda x, t: x[::10][0],
    "x[::10].mean": lambda x, t: x[::10].mean(),
    "x[::10][-1]": lambda x, t: x[::10][-1],
    "x[::3].sum(0)": lambda x, t: x[::3].sum(0),
    "x[1::2].sum(0)": lambda x, t: x[1::2].sum(0),
    "x[:10][-1]": lambda x, t: x[:10][-1],
    "x[:10].sum(0)": lambda x, t: x[:10].sum(0),
    "x[:10].mean()": lambda x, t: x[:10].mean(),
    "x[-10:][0]": lambda x, t: x[-10:][0],
    "x[-10:].sum(0)": lambda x, t: x[-10:].sum(0),
    "x[5:15].sum(0)": lambda x, t: x[5:15].sum(0),
    "x[:-10].sum(0)": lambda x, t: x[:-10].sum(0),
    "x.split(7)[0].sum": lambda x, t: x.split(7)[0].sum(0),
    "x.split(7)[-1].sum": lambda x, t: x.split(7)[-1].sum(0),
    "x.split(7)[0][-1]": lambda x, t: x.split(7)[0][-1],
    "x.split(3)[1][-1]": lambda x, t: x.split(3)[1][-1],
    "x.split([3, T - 3])[1].sum": lambda x, t: x.split([3, x.shape[0] - 3])[1].sum(0),
    "x.tensor_split(4)[1].sum": lambda x, t: x.tensor_split(4)[1].sum(0),
    "x.tensor_split(4)[-1].sum": lambda x, t: x.tensor_split(4)[-1].sum(0),
    "x.unfold(0, 4, 4)[-1]": lambda x, t: x.unfold(0, 4, 4)[-1].sum(-1),
    "x.unfold(0, 5, 1).sum": lambda x, t: x.unfold(0, 5, 1).sum(0).sum(-1),
    "x.unfold(0, 4, 3)[0]": lambda x, t: x.unfold(0, 4, 3)[0].sum(-1),
    "x[:min(T, 12)].sum": lambda x, t: x[: min(x.shape[0], 12)].sum(0),
    "x[:min(t, 5) + 1].sum": lambda x, t: x[: min(t, 5) + 1].sum(0),
    "x[max(0, t - 4): t + 1].sum": lambda x, t: x[max(0, t - 4) : t + 1].sum(0),
    "x[max(0, t - 12): t + 1].sum": lambda x, t: x[max(0, t - 12) : t + 1].sum(0),
    "x[:t + 1].mean(0)": lambda x, t: x[: t + 1].mean(0),
    "x[t:].mean(0)": lambda x, t: x[t:].mean(0),
    "x[t: t + 3].sum(0)": lambda x, t: x[t : t + 3].sum(0),
    "x.narrow(0, 0, 5).sum": lambda x, t: x.narrow(0, 0, 5).sum(0),
    "x.narrow(0, 0, min(T, 11))": lambda x, t: x.narrow(0, 0, min(x.shape[0], 11)).sum(0),
    "x.narrow(0, T // 2, 3)": lambda x, t: x.narrow(0, x.shape[0] // 2, 3).sum(0),
    "arange(T)[:10]": lambda x, t: x[torch.arange(x.shape[0])[:10]].sum(0),
    "arange(T).double()[:10].sum": lambda x, t: torch.arange(x.shape[0]).double()[:10].sum() / 100,
    "arange(0, T, 7)": lambda x, t: x[torch.arange(0, x.shape[0], 7)].sum(0),
    "linspace": lambda x, t: torch.linspace(0, 1, x.shape[0])[:8].sum(),
    "x[:T // 2].sum": lambda x, t: x[: x.shape[0] // 2].sum(0),
    "x[T // 2]": lambda x, t: x[x.shape[0] // 2],
    "x[T // 3:].mean": lambda x, t: x[x.shape[0] // 3 :].mean(0),
    "x[:, :2] [:9]": lambda x, t: x[:9, :, :1].sum(0),
    "topk": lambda x, t: x.topk(3, 0)[0].sum(0),
    "topk of min": lambda x, t: x.topk(min(10, x.shape[0]), 0)[0].sum(0),
    "x.reshape(2, -1)": lambda x, t: x[: x.shape[0] // 2 * 2].reshape(2, -1, 3, 4)[0].sum(0),
    "x.view(T, -1).T[:10]": lambda x, t: x.reshape(x.shape[0], -1).T[:10].mean(),
    "avg_pool": lambda x, t: F.avg_pool1d(x.permute(1, 2, 0), 5)[..., -1],
    "adaptive": lambda x, t: F.adaptive_avg_pool1d(x.permute(1, 2, 0), 4)[..., 1],
    "conv stride": lambda x, t: F.avg_pool1d(x.permute(1, 2, 0), 3, 2).sum(-1),
    "roll [:10]": lambda x, t: x.roll(1, 0)[:10].sum(0),
    "cumsum[:10][-1]": lambda x, t: x.cumsum(0)[:10][-1],
    "index_select": lambda x, t: x.index_select(0, torch.arange(min(x.shape[0], 10))).sum(0),
    "take 10 of flip": lambda x, t: x.flip(0)[:10].sum(0),
    "pad": lambda x, t: F.pad(x, (0, 0, 0, 0, 0, 20))[:15].sum(0),
    "len of chunk": lambda x, t: x[t] * len(x.chunk(10)),
    "len of split": lambda x, t: x[t] / len(x.split(7)),
    "shape of [:10]": lambda x, t: x[t] / x[:10].shape[0],
    "numel": lambda x, t: x[t] / x[::10].numel(),
}


class Net(nn.Module):
    """A loop whose steps read what a form makes of the sequence."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.a, self.b, self.form = nn.Linear(4, 5), nn.Linear(5, 5), form

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(3, 5), []
        for t in range(x.shape[0]):
            h = torch.tanh(self.a(x[t] + self.form(x, t)) + self.b(h))
            out.append(h)
        return torch.stack(out)


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", FORMS)
def test_what_a_step_makes_of_a_sequence_is_right(name: str) -> None:
    torch.manual_seed(0)
    model = Net(FORMS[name]).double()
    fast = reroll.compile(model, lowering="eager")
    for steps in (24, 13, 24):
        x = torch.randn(steps, 3, 4, dtype=torch.float64, requires_grad=True)
        results = fast(x), model(x)
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)
        grads = (torch.autograd.grad(each.square().sum(), [x, *model.parameters()]) for each in results)
        torch.testing.assert_close(*grads, rtol=0, atol=1e-10)
