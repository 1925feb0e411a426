"""What surrounds a model and its inputs: hooks, torch's cache of parametrizations, transforms, memory of inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

import reroll
from reroll.errors import RerollWarning, UnsupportedError

pytestmark = pytest.mark.usefixtures("double_precision")
EAGER: dict[str, Any] = {"lowering": "eager"}


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.utils.parametrizations.weight_norm(nn.RNNCell(3, 5), "weight_hh")

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 5)
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
        return h


def gradients(model: nn.Module, run: Callable[..., Any], *xs: Tensor, around: Any = nullcontext) -> list[Tensor]:
    model.zero_grad()
    surroundings: AbstractContextManager[Any] = around()
    with surroundings:
        loss = sum((run(x).sin().sum() * number for number, x in enumerate(xs, 1)), torch.zeros(()))
        loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(each.clone() for each in found if each is not None)]


INPUTS = {
    "one sample for a batch": lambda: torch.randn(20, 6, 3)[:, :1].expand(20, 3, 3),
    "one feature for all": lambda: torch.randn(20, 6, 3)[..., :1].expand(20, 6, 3),
    "every other step": lambda: torch.randn(40, 1, 3).expand(40, 4, 3)[::2],
    "dense but for the batch": lambda: torch.randn(20, 1, 3).expand(20, 4, 3),
    "one step for all": lambda: torch.randn(9, 6, 3)[:1].expand(20, 6, 3),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_may_be_expanded_and_have_gaps(name: str) -> None:
    model, x = Cell(), INPUTS[name]()
    reroll.check(reroll.compile(model, **EAGER), x, strict=True, measure=False)


def test_hooks_of_the_model_are_read_with_it() -> None:
    model = Cell()
    compiled, x = reroll.compile(model, **EAGER), torch.randn(12, 2, 3)
    torch.testing.assert_close(gradients(model, compiled, x), gradients(model, model, x))
    before, after = model.register_forward_pre_hook(doubled), model.register_forward_hook(shifted)
    torch.testing.assert_close(gradients(model, compiled, x), gradients(model, model, x))
    assert len(reroll.explain(compiled, x).loops) == 1
    before.remove()
    torch.testing.assert_close(gradients(model, compiled, x), gradients(model, model, x))
    after.remove()
    torch.testing.assert_close(gradients(model, compiled, x), gradients(model, model, x))


def doubled(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * 2,)


def shifted(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output + 0.5


def test_the_cache_of_parametrizations_holds_nothing_of_a_look() -> None:
    model = Cell()
    compiled = reroll.compile(model, **EAGER)
    for lengths in ((12,), (12, 20), (20, 12, 12), (40,)):
        xs = [torch.randn(length, 2, 3) for length in lengths]
        expected = gradients(model, model, *xs, around=parametrize.cached)
        torch.testing.assert_close(gradients(model, compiled, *xs, around=parametrize.cached), expected)


def trained_alike(called: Callable[..., Any], plain: Callable[..., Any], *args: Tensor) -> None:
    """Results and gradients of a compiled function are those of the plain one, from the same seed."""
    found = []
    for each in (called, plain):
        given = [value.detach().requires_grad_() for value in args]
        np.random.seed(0)  # noqa: NPY002
        y = each(*given)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), given), float(np.random.rand())])  # noqa: NPY002
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_transforms_in_a_step_are_right() -> None:
    def inner(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).square().sum()

    def run(x: Tensor, w: Tensor) -> Tensor:
        for t in range(x.shape[0]):
            w = w - 0.1 * torch.func.grad(inner)(w, x[t])
        return w

    compiled = reroll.compile(run, **EAGER)
    for steps in (12, 20, 12):
        trained_alike(compiled, run, torch.randn(steps, 2, 3), torch.randn(3, 5))


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize(
    "transformed",
    [
        lambda run, x: torch.vmap(run)(torch.stack([x, 2 * x])),
        lambda run, x: torch.func.grad(lambda x: run(x).sum())(x),
        lambda run, x: torch.func.jvp(run, (x,), (x,))[1],
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_a_transform_around_a_model_runs_it_as_it_is(transformed: Callable[..., Tensor]) -> None:
    model, x = Cell(), torch.randn(12, 2, 3)
    run = reroll.compile(model, **EAGER)
    with pytest.warns(RerollWarning, match=r"A torch\.func transform .* runs as plain PyTorch"):
        found = transformed(run, x)
    torch.testing.assert_close(found, transformed(model, x))
    with pytest.raises(UnsupportedError, match="Forward-mode gradients"), forward_ad.dual_level():
        run(forward_ad.make_dual(x, x))


def within_fakes(run: Any, x: Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return run(mode.from_tensor(x))


@pytest.mark.parametrize(
    "traced",
    [
        lambda run, x: torch.export.export(run, (x,)).module()(x),
        lambda run, x: make_fx(run)(x)(x),
        lambda run, x: make_fx(run, pre_dispatch=True)(x)(x),
        lambda run, x: torch.zeros(within_fakes(run, x).shape),
        lambda run, x: torch.zeros(run(FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x)).shape),
    ],
    ids=["export", "make_fx", "make_fx, before autograd", "FakeTensorMode", "a fake tensor"],
)
def test_a_tracer_around_a_model_sees_it_as_it_is(traced: Callable[..., Tensor]) -> None:
    model, x = Cell(), torch.randn(12, 2, 3)
    run = reroll.compile(model, **EAGER)
    with pytest.warns(RerollWarning, match=r"A tracer .* runs as plain PyTorch"):
        found = traced(run, x)
    torch.testing.assert_close(found, traced(model, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        torch.testing.assert_close(run(x), model(x))


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_gradients_that_a_model_takes_itself_are_right() -> None:
    def learns(x: Tensor, w: Tensor) -> Tensor:
        for t in range(x.shape[0]):
            (step,) = torch.autograd.grad((x[t] @ w).square().sum(), w, create_graph=True)
            w = w - 0.1 * step
        return w

    compiled = reroll.compile(learns, **EAGER)
    for steps in (12, 20, 12):
        trained_alike(compiled, learns, torch.randn(steps, 2, 3), torch.randn(3, 5))


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_numbers_of_numpy_are_drawn_as_without_reroll() -> None:
    """Torch's compiler draws others in their place."""

    def noisy(x: Tensor) -> Tensor:
        h = x[0] + torch.from_numpy(np.random.randn(2, 3))  # noqa: NPY002
        for t in range(x.shape[0]):
            h = torch.tanh(h + x[t])
        return h

    compiled = reroll.compile(noisy, **EAGER)
    for steps in (12, 20, 12):
        trained_alike(compiled, noisy, torch.randn(steps, 2, 3))


def test_what_a_model_holds_may_hold_itself() -> None:
    model = Cell()
    holder: dict[str, Any] = {"scale": torch.tensor(2.0)}
    holder["again"] = [holder, (holder,)]
    model.__dict__["holder"] = holder
    reroll.check(reroll.compile(model, **EAGER), torch.randn(12, 2, 3), strict=True, measure=False)


@pytest.mark.parametrize("kept", [lambda value: value, lambda value: value.detach().norm()])
@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_values_that_a_hook_adds_to_a_list_are_added_once(kept: Callable[[Tensor], Tensor]) -> None:
    model, seen = Cell(), list[Tensor]()
    model.cell.register_forward_hook(lambda _, __, result: seen.append(kept(result)))
    run = reroll.compile(model, **EAGER)
    for steps in (20, 9, 20):
        x, found = torch.randn(steps, 4, 3), list[Any]()
        for called in (run, model):
            seen.clear()
            found.append([*gradients(model, called, x), *(value.detach() for value in seen)])
            assert len(seen) == steps
        torch.testing.assert_close(*found)
