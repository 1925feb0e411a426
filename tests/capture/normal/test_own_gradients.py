"""Functions, operators and hooks whose gradients are not linear in what comes in: each works where the user has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import reroll
from agreement import compare, differences, results, sizes
from networks import Clip

STEPS = 7


class Norm(torch.autograd.Function):
    """A gradient of length 0.1, to which something is added, also where none comes in."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 0.1 * grad / (grad.norm() + 1e-3) + 0.01


class Fire(torch.autograd.Function):
    """Spikes; the potential is reset in place."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> tuple[Tensor, Tensor]:
        z = (v > 0.3).to(v.dtype)
        ctx.save_for_backward(z)
        v.mul_(1 - z)
        ctx.mark_dirty(v)
        return v, z

    @staticmethod
    def backward(ctx: Any, gv: Tensor, gz: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        return gv * (1 - z) + gz * 0.3


class Half(torch.autograd.Function):
    """Halves its operand in place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value.mul_(0.5)
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


clip: Any = Clip.apply
norm: Any = Norm.apply
fire: Any = Fire.apply
half: Any = Half.apply


def hooked(value: Tensor, hook: Callable[[Tensor], Tensor] = lambda grad: grad.clamp(-0.05, 0.05)) -> Tensor:
    if value.requires_grad:
        value.register_hook(hook)
    return value


class Network(nn.Module):
    """A loop over the rows of x with one of the steps below."""

    def __init__(self, step: Callable[..., Any], end: Callable[..., Any] = lambda m, x, h, ys: (torch.stack(ys), h)):
        super().__init__()
        self.w, self.u, self.step, self.end = nn.Parameter(torch.randn(4, 4) * 0.4), nn.Linear(4, 4), step, end

    def forward(self, x: Tensor) -> Any:
        h, ys = x.new_zeros(x.shape[1], 4), []
        for t in range(x.shape[0]):
            h, y = self.step(self, x, t, h)
            ys.append(y)
        return self.end(self, x, h, ys)


def weight(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    h = torch.tanh(x[t] + h @ clip(m.w))
    return h, h


def weight_hooked(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    h = torch.tanh(x[t] + h @ hooked(m.w * 1.0))
    return h, h


def constant(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    h = torch.tanh(h @ m.w + clip(m.u(x[0])) + clip(x[0]) + x[t])
    return h, h


def in_checkpoint(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    w = checkpoint(lambda w: clip(w) * 1.0, m.w, use_reentrant=False)
    h = torch.tanh(h @ w + x[t])
    return h, h


def twice(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    h = torch.tanh(x[t] + clip(h) @ m.w + 0.5 * clip(h))
    return h, h


def twice_detached(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    v = x[t] + h @ m.w
    h = torch.tanh(clip(v) - 0.1 * clip(v).clone().detach())
    return h, h


def hook_late(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    h = torch.tanh(x[t] + h @ m.w)
    y = m.u(h)
    hooked(h)
    return h, y


def hook_before(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    hooked(h)
    return torch.tanh(x[t] + h @ m.w), h


def hooks(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    h = torch.tanh(x[t] + h @ m.w)
    hooked(h, lambda grad: grad.clamp(-0.1, 0.1))
    y = h * 0.5
    hooked(h, lambda grad: grad * 2 + 0.01)
    return h, y


def hook_reading(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    scale = x[t].detach().abs()
    h = hooked(torch.tanh(x[t] + h @ m.w), functools.partial(torch.mul, scale))
    return h, h


def of_row(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    r = hooked(m.u(x[t]))
    h = torch.tanh(r + r * h @ m.w)
    return h, norm(m.u(h))


def dirty(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    v, z = fire(0.8 * h + x[t] @ m.w)
    return v + 0.01 * m.w.sum(0), z


STEP = [weight, weight_hooked, constant, in_checkpoint, twice, twice_detached, hook_late, hook_before, hooks]
STEP += [hook_reading, of_row, dirty]


def x_of(steps: int = STEPS) -> Tensor:
    return torch.randn(steps, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("step", STEP, ids=lambda step: step.__name__)
def test_gradients_are_eagers(step: Any) -> None:
    if "hook" in step.__name__ or step is of_row:
        pytest.importorskip("torch._higher_order_ops.register_hook")  # Dynamo cuts the graph before torch 2.13
    torch.manual_seed(0)
    differ, made = compare(Network(step).double(), (x_of(),))
    assert not differ
    assert made[-1].recurrences


def test_functions_that_give_other_numbers_of_values() -> None:
    """One that gives two at every step, and one that gives one, behind the loop."""
    torch.manual_seed(0)
    model = Network(dirty, lambda m, x, h, ys: (torch.stack(ys), norm(h)))
    differ, made = compare(model.double(), (x_of(),))
    assert not differ
    assert made[-1].recurrences


def test_those_of_any_length() -> None:
    torch.manual_seed(0)

    def step(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
        h = torch.tanh(h @ clip(m.w) + clip(m.u(x[0])) + clip(h) + clip(h))
        return h, h

    model = Network(step).double()
    compiled = reroll.compile(model, lowering="eager", segment=2)
    for steps in (STEPS, STEPS + 4):
        assert not differences(results(compiled, model, (x_of(steps),)), results(model, model, (x_of(steps),)))


def test_hooks_of_other_batch_sizes() -> None:
    """Dynamo hands the sizes over to a hook, from the second one on."""
    pytest.importorskip("torch._higher_order_ops.register_hook")
    torch.manual_seed(0)
    model = Network(hook_late).double()
    compiled = torch.compile(model, backend="reroll", options={"lowering": "eager", "segment": 2})
    for batch in (3, 5):
        x = torch.randn(STEPS, batch, 4, dtype=torch.float64)
        assert not differences(results(compiled, model, (x,)), results(model, model, (x,)))


def test_a_function_that_runs_twice_for_one_gradient_runs_once() -> None:
    torch.manual_seed(0)
    _, made = compare(Network(twice_detached).double(), (x_of(),))
    _, both = compare(Network(twice).double(), (x_of(),))
    count = [str(each[-1].recurrences[0].step.graph).count("autograd_function_apply](") for each in (made, both)]
    assert count == [1, 2]


def test_what_shows_an_update_in_a_function_is_said_and_runs_as_it_is() -> None:
    def step(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
        g = h @ m.w + x[t]
        half(g[:, :2])
        return torch.tanh(g), g

    model, x = Network(step), x_of().float()
    with pytest.warns(reroll.RerollWarning, match=r"in step: half.*clone\(\)"):
        found = results(reroll.compile(model, lowering="eager"), model, (x,))
    assert not differences(found, results(model, model, (x,)))


def test_an_update_that_a_function_hides_is_refused() -> None:
    class Hides(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor, mean: Tensor) -> Tensor:
            mean.mul_(0.9).add_(value.detach().mean(0))
            return value * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, None

    hides: Any = Hides.apply

    def step(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
        m.mean = x.new_zeros(4) if t == 0 else m.mean
        h = torch.tanh(hides(h, m.mean) @ m.w + x[t] + m.mean.clone())
        return h, h

    with pytest.raises(reroll.RerollError, match="mark_dirty"):
        torch.compile(Network(step), backend="reroll", options={"lowering": "eager"})(x_of().float())


def test_steps_that_are_left_out_give_no_gradient_of_their_own() -> None:
    def step(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
        h = chosen(torch.tanh(x[t] + h @ m.w))
        return h, h

    def end(m: Any, x: Tensor, h: Tensor, ys: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(m.u(torch.stack(ys)[:-1]), x[1:] * 0.5)

    chosen = clip
    torch.manual_seed(0)
    differ, made = compare(Network(step, end).double(), (x_of(),))
    assert not differ
    assert made[-1].recurrences[0].steps == STEPS
    chosen = norm
    with pytest.raises(reroll.UnsupportedError, match=r"0 \* output.sum"):
        compare(Network(step, end).double(), (x_of(),))


@torch.library.custom_op("reroll_tests::relu", mutates_args=(), tags=(torch.Tag.pointwise,))
def of_all_rows(value: Tensor) -> Tensor:
    """Has the name of an operation on each entry, and the tag, and is none."""
    return value - value.mean(0)


@torch.library.custom_op("reroll_tests::sum", mutates_args=())
def largest(value: Tensor) -> Tensor:
    """Has the name of a sum, and is none."""
    return value.square().sum().sqrt()


@of_all_rows.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


@largest.register_fake
def _(value: Tensor) -> Tensor:
    return value.new_empty(())


of_all_rows.register_autograd(lambda ctx, grad: of_all_rows(grad))
largest.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0] / largest(ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def plain(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    h = torch.tanh(x[t] + h @ m.w)
    return h, h


def last_unread(m: Any, x: Tensor, t: int, h: Tensor) -> Any:
    h = torch.tanh(torch.sigmoid(0.5 * x[t] + h @ m.w) * 0.7 + 0.1 * h)
    return norm(h), h


REWRITES = {
    "reroll.capture.steps.step": (weight, None),
    "reroll.graph.editing": (twice, None),
    "reroll.capture.ends": (last_unread, lambda m, x, h, ys: torch.stack(ys)),
    "reroll.capture.rows.row_analysis": (
        plain,
        lambda m, x, h, ys: torch.ops.reroll_tests.relu(m.u(torch.stack(ys))).square().mean(),
    ),
    "reroll.passes.loop.reductions": (
        plain,
        lambda m, x, h, ys: torch.ops.reroll_tests.sum(m.u(torch.stack(ys))),
    ),
}


def with_a_sum(m: Any, x: Tensor, h: Tensor, ys: list[Tensor]) -> Any:
    return h, sum(ys)


def with_rows_computed_behind(m: Any, x: Tensor, h: Tensor, ys: list[Tensor]) -> Any:
    return h, torch.stack([m.u(y).tanh() for y in ys])


@pytest.mark.parametrize("end", [with_a_sum, with_rows_computed_behind])
def test_an_update_in_a_function_stays_where_a_rewrite_erases_what_nobody_reads(end: Callable[..., Any]) -> None:
    """``v.mul_(...)`` in the forward: its result has no reader, as the function returns ``v``."""
    torch.manual_seed(0)
    differ, made = compare(Network(dirty, end).double(), (x_of(14),))
    assert not differ
    assert made[-1].recurrences


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("place", REWRITES)
def test_each_rewrite_asks_whether_what_it_moves_is_torchs(
    place: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, end = REWRITES[place]
    torch.manual_seed(0)
    model = (Network(step, end) if end else Network(step)).double()
    if not asks:
        monkeypatch.setattr(f"{place}.is_torchs", lambda *_: True)
    try:
        differ, made = compare(model, (x_of(),))
    except reroll.RerollError as error:
        differ, made = [str(error)], []
    assert bool(differ) is not asks
    assert not asks or made[-1].recurrences
    assert sizes(made) or not asks
