"""What users expect of any model keeps working when its loop is rolled: each case beside plain autograd, in one run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pairs import DOUBLE, SCHEDULES, B, H, I, Net, T, compiled, data, grad_of, loss_of, pair, same, same_grads

pytestmark = pytest.mark.usefixtures("shared_walks")


@pytest.mark.variants(4)
@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_gradients_of_parameters_inputs_and_initial_state(options: dict[str, Any]) -> None:
    plain, twin, fast = pair(options)
    x, v = data(True), torch.randn(B, H, dtype=torch.float64, requires_grad=True)
    x2, v2 = x.detach().clone().requires_grad_(), v.detach().clone().requires_grad_()
    loss_of(plain(x, v)).backward()
    loss_of(fast(x2, v2)).backward()
    same_grads(twin, plain)
    same(x2.grad, x.grad)
    same(v2.grad, v.grad)
    assert float(plain.wr.weight.grad.abs().max()) > 1e-3


@pytest.mark.parametrize("schedule", ["remote", "hierarchical", "double"])
def test_offload_and_codec_change_no_bit(schedule: str) -> None:
    plain = Net().double()
    results = []
    for remote, codec in (("disk", "auto"), ("disk", "none"), ("host", "auto")):
        twin = copy.deepcopy(plain)
        options = {**DOUBLE, "schedule": schedule, "remote": remote, "codec": codec}
        options = {k: v for k, v in options.items() if k != "slots" or schedule != "remote"}
        torch.manual_seed(1)
        loss_of(compiled(twin, **options)(data())).backward()
        results.append([grad_of(p) for p in twin.parameters()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("options", SCHEDULES[1:3], ids=("standard", "double"))
def test_two_forwards_before_two_backwards(options: dict[str, Any]) -> None:
    plain, twin, fast = pair(options)
    x, y = data(), data()
    first, second = loss_of(plain(x)), loss_of(plain(y))
    first.backward()
    second.backward()
    first, second = loss_of(fast(x)), loss_of(fast(y))
    first.backward()
    second.backward()
    same_grads(twin, plain)


def test_gradient_accumulation_over_calls() -> None:
    plain, twin, fast = pair(DOUBLE)
    for seed in range(3):
        torch.manual_seed(seed)
        x = data()
        loss_of(plain(x)).backward()
        loss_of(fast(x)).backward()
    same_grads(twin, plain)


@pytest.mark.parametrize("options", SCHEDULES[:3], ids=("store_all", "standard", "double"))
def test_retain_graph_reverses_twice(options: dict[str, Any]) -> None:
    plain, twin, fast = pair(options)
    x = data()
    expected, actual = loss_of(plain(x)), loss_of(fast(x))
    expected.backward(retain_graph=True)
    expected.backward()
    actual.backward(retain_graph=True)
    actual.backward()
    same_grads(twin, plain)
    with pytest.raises(RuntimeError, match="second time"):
        actual.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    plain, _, fast = pair(DOUBLE)
    x = data()
    with mode():
        expected, actual = plain(x), fast(x)
    same(actual[0], expected[0])
    same(actual[1], expected[1])
    assert not actual[0].requires_grad
    loss_of(fast(x)).backward()  # and training afterwards still works


def test_frozen_parameters_get_no_gradient() -> None:
    plain, twin, fast = pair(DOUBLE)
    for model in (plain, twin):
        model.wr.weight.requires_grad_(False)
    x = data()
    loss_of(plain(x)).backward()
    loss_of(fast(x)).backward()
    assert twin.wr.weight.grad is None
    same_grads(twin, plain)


@pytest.mark.parametrize(
    "use", [lambda o: o[0].sum(), lambda o: o[1].sum(), lambda o: o[0][-1].sum(), lambda o: o[0][4, 1, 0]]
)
def test_some_outputs_unused(use: Callable[[Any], Tensor]) -> None:
    plain, twin, fast = pair(DOUBLE)
    x = data()
    use(plain(x)).backward()
    use(fast(x)).backward()
    same_grads(twin, plain)


class LastOnly(nn.Module):
    """Gives the last output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x_TBI: Tensor) -> Any:
        return self.net(x_TBI)[0][-1]


def test_only_the_last_output_is_used() -> None:
    plain, twin, fast = pair(DOUBLE, LastOnly)
    x = data()
    plain(x).square().sum().backward()
    fast(x).square().sum().backward()
    same_grads(twin, plain)


def test_dropout_is_the_same_in_forward_and_recomputation_and_that_of_eager() -> None:
    plain, twin, fast = pair({**DOUBLE, "verify": True}, lambda: Net(dropout=0.4))
    x = data()
    torch.manual_seed(3)
    loss_of(plain(x)).backward()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    loss_of(fast(x)).backward()
    assert torch.equal(torch.get_rng_state(), state)
    same_grads(twin, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_equal_eager(dtype: torch.dtype) -> None:
    plain = Net().to(dtype)
    twin = copy.deepcopy(plain)
    x = data().to(dtype)
    expected, actual = plain(x), compiled(twin, **DOUBLE)(x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    loss_of(expected).backward()
    loss_of(actual).backward()
    bound = 1e-5 if dtype is torch.float32 else 0.1
    for a, b in zip(twin.parameters(), plain.parameters(), strict=True):
        assert grad_of(a).dtype is dtype
        assert float((grad_of(a) - grad_of(b)).abs().max()) <= bound * float(grad_of(b).abs().max())


def test_autocast_around_the_model() -> None:
    plain = Net()
    twin, reference = copy.deepcopy(plain), copy.deepcopy(plain)
    fast, x = compiled(twin, **DOUBLE), data().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = plain(x), fast(x)
    assert actual[0].dtype is expected[0].dtype
    assert torch.equal(actual[0], expected[0])
    loss_of(actual).backward()
    loss_of(expected).backward()
    loss_of(reference(x)).backward()
    for a, b, c in zip(twin.parameters(), plain.parameters(), reference.parameters(), strict=True):
        ours, theirs = (grad_of(a) - grad_of(c)).norm(), (grad_of(b) - grad_of(c)).norm()
        assert ours <= 1.5 * theirs + 1e-3 * grad_of(c).norm()  # as near to float32 as eager autocast is


class Normalised(nn.Module):
    """Batch norm in the step, and a hidden state that stays on the module between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.RNNCell(I, H), nn.BatchNorm1d(H)
        self.h: Tensor
        self.register_buffer("h", torch.zeros(B, H))

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, total = self.h, x_TBI.new_zeros(())
        for t in range(x_TBI.shape[0]):
            h_BH = self.norm(self.cell(x_TBI[t], h_BH))
            total = total + h_BH.pow(3).mean()
        self.h = h_BH.detach()
        return total


@pytest.mark.parametrize("options", SCHEDULES[1:3], ids=("standard", "double"))
def test_buffers_are_updated_once(options: dict[str, Any]) -> None:
    plain, twin, fast = pair(options, Normalised)
    for _ in range(2):
        x = data()
        plain(x).backward()
        fast(x).backward()
        same_grads(twin, plain)
        for actual, expected in zip(twin.buffers(), plain.buffers(), strict=True):
            same(actual.double(), expected.double())
    assert int(twin.norm.num_batches_tracked) == 2 * T


def test_hooks_on_parameters_outputs_and_modules() -> None:
    plain, twin, fast = pair(DOUBLE)
    seen: dict[str, list[Tensor]] = {"plain": [], "twin": []}

    def note(name: str, factor: int) -> Callable[[Tensor], Tensor]:
        return lambda grad: (seen[name].append(grad), grad * factor)[1]  # type: ignore[func-returns-value]

    x = data()
    for name, model, call in (("plain", plain, plain), ("twin", twin, fast)):
        model.wr.weight.register_hook(note(name, 2))
        model.wi.weight.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.clone()))
        outputs = call(x)
        outputs[0].register_hook(note(name, 3))
        loss_of(outputs).backward()
    assert len(seen["plain"]) == len(seen["twin"]) == 3
    same_grads(twin, plain)


def test_an_exception_in_the_backward_leaves_the_next_step_clean() -> None:
    plain, twin, fast = pair({**DOUBLE, "verify": True}, lambda: Net(dropout=0.2))
    x = data()

    def fail(_: Tensor) -> None:
        raise ValueError("stop here")

    outputs = fast(x)
    handle = twin.wr.weight.register_hook(fail)
    with pytest.raises(ValueError, match="stop here"):
        loss_of(outputs).backward()
    handle.remove()
    twin.zero_grad()
    del outputs
    torch.manual_seed(0)
    loss_of(plain(x)).backward()
    torch.manual_seed(0)
    loss_of(fast(x)).backward()
    same_grads(twin, plain)
