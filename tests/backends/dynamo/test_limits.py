"""What is refused, what is an error in eager too, and what must leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

from pairs import DOUBLE, B, H, I, T, data, loss_of, pair, same, same_grads
from reroll.errors import RerollWarning, UnsupportedError


def test_double_backward_is_refused() -> None:
    _, twin, fast = pair(DOUBLE)
    loss = loss_of(fast(data()))
    with pytest.raises(UnsupportedError, match=r"Double backward .* not supported"):
        torch.autograd.grad(loss, list(twin.parameters()), create_graph=True)


class Smooth(nn.Module):
    """A recurrence without a custom function, which torch.func would refuse by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(I + H, H)

    def forward(self, x_TBI: Tensor) -> tuple[Tensor, Tensor]:
        h_BH, ys = x_TBI.new_zeros(x_TBI.shape[1], H), []
        for t in range(x_TBI.shape[0]):
            h_BH = torch.tanh(self.cell(torch.cat([x_TBI[t], h_BH], -1)))
            ys.append(h_BH)
        return torch.stack(ys), h_BH


@pytest.mark.parametrize("transform", ["grad", "vmap", "jacrev"])
def test_torch_func_is_refused(transform: str) -> None:
    plain, _, fast = pair(DOUBLE, Smooth)
    x = data()
    calls: dict[str, Callable[[Any], Any]] = {
        "grad": lambda f: torch.func.grad(lambda x: loss_of(f(x)))(x),
        "vmap": lambda f: torch.func.vmap(lambda x: f(x)[0])(x.expand(2, T, B, I)),
        "jacrev": lambda f: torch.func.jacrev(lambda x: f(x)[0][-1].sum())(x),
    }
    expected = calls[transform](plain)
    assert torch.isfinite(expected).all()
    with pytest.raises((UnsupportedError, Unsupported), match=r"functorch|torch\.func"):
        calls[transform](fast)


def test_a_transform_inside_what_is_compiled_is_left_to_torch() -> None:
    plain, x = Smooth().double(), data()
    transformed = torch.func.grad(lambda x: loss_of(plain(x)))
    fast: Any = torch.compile(transformed, backend="reroll", options={"lowering": "eager"})
    with pytest.warns(RerollWarning, match=r"torch\.func transform"):
        actual = fast(x)
    same(actual, transformed(x))


def test_an_input_changed_between_forward_and_backward_is_an_error() -> None:
    _, twin, fast = pair(DOUBLE)
    loss = loss_of(fast(data()))
    with torch.no_grad():
        twin.wr.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_outputs_may_be_changed_in_place() -> None:
    plain, twin, fast = pair(DOUBLE)
    x = data()
    for call in (plain, fast):
        outputs = call(x)
        outputs[1].mul_(2)
        (outputs[0].clone().square().mean() + outputs[1].sum()).backward()
    same_grads(twin, plain)


def test_nothing_is_left_when_a_graph_dies_without_backward() -> None:
    import gc
    import weakref

    from reroll.backends.runtime.run import Run

    before = {id(o) for o in gc.get_objects() if type(o) is Run}
    _, _, fast = pair(DOUBLE)
    outputs = fast(data())
    runs = [weakref.ref(o) for o in gc.get_objects() if type(o) is Run and id(o) not in before]
    assert runs
    del outputs
    gc.collect()
    assert all(run() is None for run in runs)


def test_training_with_an_optimizer_follows_plain_training() -> None:
    plain, twin, fast = pair(DOUBLE)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (plain, twin)]
    for seed in range(4):
        torch.manual_seed(seed)
        x = data()
        for call, optimizer in zip((plain, fast), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(call(x)).backward()
            optimizer.step()
    for a, b in zip(twin.parameters(), plain.parameters(), strict=True):
        assert float((a - b).abs().max()) < 1e-10
