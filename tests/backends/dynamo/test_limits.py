"""What is refused, what is an error in eager too, and what must leave nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

import reroll
from pairs import DOUBLE, B, H, I, T, data, loss_of, pair, same, same_grads
from reroll.backends.dynamo.garbage import Collections
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


@pytest.fixture
def usual_collections() -> Iterator[None]:
    """Python's thresholds of its cycle collector, whatever these tests set."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("usual_collections")
def test_the_threshold_is_put_back_behind_the_last_compilation() -> None:
    found, seen = Collections(), []
    with found:
        seen.append(gc.get_threshold())
        with found:
            pass
        seen.append(gc.get_threshold())
    assert seen == [(700, 10, 200)] * 2
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(700, 10, 1_000), (0, 0, 0)])
@pytest.mark.usefixtures("usual_collections")
def test_what_the_user_set_is_not_set_back(own: tuple[int, int, int]) -> None:
    with Collections():
        gc.set_threshold(*own)
    assert gc.get_threshold() == own


@pytest.mark.usefixtures("usual_collections")
def test_collections_that_wait_longer_go_on_waiting() -> None:
    gc.set_threshold(700, 10, 1_000)
    with Collections():
        assert gc.get_threshold() == (700, 10, 1_000)


@pytest.mark.parametrize(("times", "due"), [(3, False), (12, True)])
@pytest.mark.usefixtures("usual_collections")
def test_a_collection_that_is_due_comes_behind_a_compilation(times: int, due: bool) -> None:
    gc.collect()
    with Collections():
        for _ in range(times):
            gc.collect(1)
    assert (gc.get_count()[2] == 0) == due


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.usefixtures("usual_collections")
def test_a_compiled_model_leaves_the_threshold(door: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(3)
        for row in x.unbind():
            h = torch.tanh(h + row)
        return h

    by_backend = torch.compile(model, backend="reroll", options={"lowering": "eager"})
    compiled = by_backend if door == "backend" else reroll.compile(model, lowering="eager")
    x = torch.randn(20, 3, requires_grad=True)
    with mock.patch.object(gc, "set_threshold", wraps=gc.set_threshold) as found:
        for _ in range(2):
            compiled(x).sum().backward()
            assert gc.get_threshold() == (700, 10, 10)
    assert found.call_args_list[0] == mock.call(700, 10, 200), "it waited while the model was compiled"


@pytest.mark.usefixtures("usual_collections")
def test_an_error_puts_it_back() -> None:
    compiled = torch.compile(lambda x: x.cumsum(0), backend="reroll", options={"schedule": "nonsense"})
    with pytest.raises(reroll.OptionError):
        compiled(torch.randn(4))
    assert gc.get_threshold() == (700, 10, 10)
