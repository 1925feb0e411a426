"""What users expect of any model keeps working when its loop is rolled: each case beside plain autograd, in one run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reroll.errors import UnsupportedError

T, B, I, H = 23, 3, 5, 7  # noqa: E741
DOUBLE = {"lowering": "eager", "schedule": "double", "chunk": 9, "slots": 3, "segment": 2, "remote": "disk"}
SCHEDULES: list[dict[str, Any]] = [
    {"lowering": "eager", "schedule": "store_all"},
    {"lowering": "eager", "segment": 3, "chunk": 5},
    DOUBLE,
    {**DOUBLE, "schedule": "hierarchical", "verify": True},
    {**DOUBLE, "remote": "local", "verify": True},
]


class Spike(torch.autograd.Function):
    """A threshold with the derivative of an arctangent."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grad / (1 + (torch.pi * u) ** 2)


class Net(nn.Module):
    """A recurrent spiking layer under a tanh readout: outputs of every step, and the last state."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wi, self.wr, self.wo = nn.Linear(I, H), nn.Linear(H, H, bias=False), nn.Linear(H, 2)
        self.dropout = dropout

    def forward(self, x_TBI: Tensor, v_BH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        v_BH = x_TBI.new_zeros(x_TBI.shape[1], H) if v_BH is None else v_BH
        z_BH, ys = torch.zeros_like(v_BH), []
        for t in range(x_TBI.shape[0]):
            v_BH = 0.9 * v_BH * (1 - z_BH) + self.wi(x_TBI[t]) + self.wr(z_BH)
            z_BH = Spike.apply(v_BH - 0.3)  # type: ignore[no-untyped-call]
            z_BH = nn.functional.dropout(z_BH, self.dropout, self.training)
            ys.append(torch.tanh(self.wo(z_BH + 0.1 * v_BH)))
        return torch.stack(ys), v_BH


def compiled(model: nn.Module, **options: Any) -> Any:
    """The model under the backend; an error if it would not be one graph."""
    return torch.compile(model, backend="reroll", options={"on_no_recurrence": "error", **options}, fullgraph=True)


def pair(options: dict[str, Any], make: Callable[[], nn.Module] = Net) -> tuple[nn.Module, nn.Module, Any]:
    """(plain model, its twin, the twin compiled) in float64."""
    plain = make().double()
    twin = copy.deepcopy(plain)
    return plain, twin, compiled(twin, **options)


def data(requires_grad: bool = False) -> Tensor:
    return torch.randn(T, B, I, dtype=torch.float64, requires_grad=requires_grad)


def loss_of(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0].square().mean() + outputs[1].sin().sum()


def same(actual: Tensor | None, expected: Tensor | None) -> None:
    """Equal to 1e-12 relative of the largest entry, and not trivially so."""
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        scale = float(expected.abs().max())
        assert float((actual - expected).abs().max()) <= 1e-12 * max(scale, 1e-30)


def same_grads(twin: nn.Module, plain: nn.Module) -> None:
    for actual, expected in zip(twin.parameters(), plain.parameters(), strict=True):
        same(actual.grad, expected.grad)


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
    assert float(plain.wr.weight.grad.abs().max()) > 1e-3  # type: ignore[union-attr, operator]


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
        results.append([p.grad for p in twin.parameters()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))  # type: ignore[arg-type]


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
        model.wr.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    x = data()
    loss_of(plain(x)).backward()
    loss_of(fast(x)).backward()
    assert twin.wr.weight.grad is None  # type: ignore[union-attr]
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


class LastOnly(Net):
    def forward(self, x_TBI: Tensor, v_BH: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x_TBI, v_BH)[0][-1]


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
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    loss_of(expected).backward()
    loss_of(actual).backward()
    bound = 1e-5 if dtype is torch.float32 else 0.1
    for a, b in zip(twin.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.dtype is dtype
        assert float((a.grad - b.grad).abs().max()) <= bound * float(b.grad.abs().max())


def test_autocast_around_the_model() -> None:
    plain = Net()
    twin, reference = copy.deepcopy(plain), copy.deepcopy(plain)
    fast, x = compiled(twin, **DOUBLE), data().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = plain(x), fast(x)
    assert actual[0].dtype is expected[0].dtype and torch.equal(actual[0], expected[0])
    loss_of(actual).backward()
    loss_of(expected).backward()
    loss_of(reference(x)).backward()
    for a, b, c in zip(twin.parameters(), plain.parameters(), reference.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and c.grad is not None
        ours, theirs = (a.grad - c.grad).norm(), (b.grad - c.grad).norm()
        assert ours <= 1.5 * theirs + 1e-3 * c.grad.norm()  # as near to float32 as eager autocast is


class Normalised(nn.Module):
    """Batch norm in the step, and a hidden state that stays on the module between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.RNNCell(I, H), nn.BatchNorm1d(H)
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
    assert int(twin.norm.num_batches_tracked) == 2 * T  # type: ignore[arg-type, union-attr]


def test_hooks_on_parameters_outputs_and_modules() -> None:
    plain, twin, fast = pair(DOUBLE)
    seen: dict[str, list[Tensor]] = {"plain": [], "twin": []}
    x = data()
    for name, model, call in (("plain", plain, plain), ("twin", twin, fast)):
        model.wr.weight.register_hook(lambda g, name=name: seen[name].append(g) or g * 2)  # type: ignore
        model.wi.weight.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.clone()))  # type: ignore
        outputs = call(x)
        outputs[0].register_hook(lambda g, name=name: seen[name].append(g) or g * 3)  # type: ignore[func-returns-value]
        loss_of(outputs).backward()
    assert len(seen["plain"]) == len(seen["twin"]) == 3
    same_grads(twin, plain)


def test_an_exception_in_the_backward_leaves_the_next_step_clean() -> None:
    plain, twin, fast = pair({**DOUBLE, "verify": True}, lambda: Net(dropout=0.2))
    x = data()

    def fail(_: Tensor) -> None:
        raise ValueError("stop here")

    outputs = fast(x)
    handle = twin.wr.weight.register_hook(fail)  # type: ignore[union-attr, operator]
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
def test_torch_func_is_right_or_refused(transform: str) -> None:
    plain, _, fast = pair(DOUBLE, Smooth)
    x = data()
    calls: dict[str, Callable[[Any], Any]] = {
        "grad": lambda f: torch.func.grad(lambda x: loss_of(f(x)))(x),
        "vmap": lambda f: torch.func.vmap(lambda x: f(x)[0])(x.expand(2, T, B, I)),
        "jacrev": lambda f: torch.func.jacrev(lambda x: f(x)[0][-1].sum())(x),
    }
    expected = calls[transform](plain)
    try:
        actual = calls[transform](fast)
    except Exception as error:
        assert "torch.func" in str(error) or "vmap" in str(error) or "functorch" in str(error), error
        return
    same(actual, expected)


def test_an_input_changed_between_forward_and_backward_is_an_error() -> None:
    _, twin, fast = pair(DOUBLE)
    loss = loss_of(fast(data()))
    with torch.no_grad():
        twin.wr.weight.mul_(2)  # type: ignore[union-attr, operator]
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

    from reroll.backends.runtime import Run

    _, _, fast = pair(DOUBLE)
    outputs = fast(data())
    runs = [weakref.ref(o) for o in gc.get_objects() if type(o) is Run]
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
