"""What tries to make ``reroll.compile`` wrong in silence: every result is eager's, or the call is refused.

Each attack does something late in a sequence, or in a place, that short traces and Dynamo's guards do not see.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import reroll
from length_networks import EAGER, Flat
from reroll.errors import RerollError

LATE = 25
Change = Callable[[int, Any], Any]
LOG: list[int] = []


pytestmark = pytest.mark.usefixtures("double_precision")


class Net(nn.Module):
    def __init__(self, body: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.cell, self.body = nn.RNNCell(2, 3), body
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def states(net: Any, x_TBI: Tensor, change: Change = lambda t, h: h) -> list[Tensor]:
    h_BH, found = x_TBI.new_zeros(x_TBI.shape[1], 3), []
    for t in range(x_TBI.shape[0]):
        h_BH = change(t, net.cell(x_TBI[t], h_BH))
        found.append(h_BH)
    return found


def late(change: Callable[[Any, Tensor], Any]) -> Callable[..., Any]:
    """A network whose step is changed from step LATE on."""
    return lambda net, x: states(net, x, lambda t, h: change(net, h) if t >= LATE else h)[-1]


def apply_late(first: Any, second: Any) -> Callable[..., Any]:
    return lambda net, x: states(net, x, lambda t, h: (second if t >= LATE else first).apply(h))[-1]


def scaled(scale: float) -> Any:
    class Scaled(Flat):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * scale

    return Scaled


def scaled_by_keyword(factor: float) -> Any:
    class Scaled(Flat):
        @staticmethod
        def backward(ctx: Any, grad: Tensor, *, scale: float = factor) -> Tensor:  # type: ignore[override]
            return grad * scale

    return Scaled


class Once(Flat):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


class OnceMore(Once):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Noted(torch.autograd.Function):
    """Its derivative depends on the length, by a number that no operation shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = 2.0 if x.shape[0] > LATE else 1.0
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.scale


def no_longer(net: Any, x_TBI: Tensor, y_T: Tensor) -> Tensor:
    h_BH = states(net, x_TBI)[-1]
    for _ in range(y_T.shape[0]):
        h_BH = torch.sin(1.1 * h_BH + 0.1)
    return h_BH + y_T.sum()


def swallowed(net: Any, x_TBI: Tensor) -> Tensor:
    def change(t: int, h_BH: Tensor) -> Tensor:
        try:
            if t == LATE:
                h_BH = h_BH * -3
        except BaseException:  # noqa: BLE001  # what a careless user writes
            pass
        return h_BH

    return states(net, x_TBI, change)[-1]


def negative_zero(net: Any, x_TBI: Tensor) -> Tensor:
    one = torch.ones(())
    return states(net, x_TBI, lambda t, h: h + torch.copysign(one, torch.tensor(-0.0 if t >= LATE else 0.0)))[-1]


def weighted(net: Any, x_TBI: Tensor) -> Tensor:
    return states(net, x_TBI, lambda t, h: h * net.w[t])[-1]


SILENT: dict[str, Callable[..., Any]] = {
    "requires_grad": late(lambda net, h: h * 0.5 if h.requires_grad else h),
    "grad_enabled": late(lambda net, h: h * 0.5 if torch.is_grad_enabled() else h),
    "truncated": late(lambda net, h: h.detach() * net.cell.bias_hh.mean() if h.requires_grad else h),
    "closure": apply_late(scaled(1.0), scaled(2.0)),
    "keyword": apply_late(scaled_by_keyword(1.0), scaled_by_keyword(2.0)),
    "wrapped": apply_late(Once, OnceMore),
    "noted": lambda net, x: Noted.apply(torch.stack(states(net, x))),  # type: ignore[no-untyped-call]
    "swallowed": swallowed,
    "negative_zero": negative_zero,
    "contiguous": lambda net, x: states(net, x if x.is_contiguous() else 2 * x)[-1],
}


def gradients(y: Tensor, net: Net) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.sum(), list(net.parameters()), allow_unused=True, materialize_grads=True)


def compare(net: Net, *calls: tuple[Tensor, ...], between: Callable[[int, Any], Any] = lambda k, net: None) -> int:
    """Compare outputs and gradients of some calls with eager; how many were refused."""
    plain, refused = copy.deepcopy(net), 0
    run = reroll.compile(net, **EAGER)
    for number, args in enumerate(calls):
        between(number, net)
        between(number, plain)
        expected = plain(*args)
        try:
            found = run(*args)
        except RerollError:
            refused += 1
            continue
        grads = [gradients(y, m) for y, m in ((expected, plain), (found, net))]
        for a, b in zip((expected, *grads[0]), (found, *grads[1]), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)
    return refused


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_wrong_in_silence(name: str) -> None:
    calls = [
        (torch.randn(40, 2, 2),),
        (torch.randn(26, 2, 2),),
        (torch.randn(80, 2, 2)[::2],),
        (torch.randn(13, 2, 2),),
    ]
    assert compare(Net(SILENT[name]), *calls) < len(calls)


def test_state_that_short_traces_do_not_read_is_seen() -> None:
    x = (torch.randn(40, 2, 2),)
    flagged = Net(late(lambda net, h: h * 0.5 if net.flag else h), flag=False)
    assert compare(flagged, x, x, x, between=lambda k, net: setattr(net, "flag", k == 1)) == 0
    compare(Net(weighted, w=[0.5] * 64), x, x, between=lambda k, net: net.w.__setitem__(39, 0.5 + k))


def test_which_arguments_have_time_is_part_of_the_call() -> None:
    x = torch.randn(40, 2, 2)
    compare(Net(no_longer), (x, torch.ones(40)), (x, torch.ones(11)), (x, torch.ones(40)))


@pytest.mark.parametrize(("at", "steps"), [(12, 40), (60, 100), (90, 100)])
def test_a_late_update_of_the_input_happens_once(at: int, steps: int) -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        return states(net, x, lambda t, h: h if t != at else h + 0 * x.mul_(0.5).sum())[-1]

    x = torch.ones(steps, 2, 2)
    with torch.no_grad():
        reroll.compile(Net(body), **EAGER)(x)
    assert x.unique().tolist() == [0.5]


@dataclasses.dataclass
class Out:
    h: Any
    n: Any


@dataclasses.dataclass
class Output(collections.OrderedDict[str, Any]):
    """Items that are fields, as transformers' models give them."""

    h: Any
    others: Any = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                super().__setitem__(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def update(self, *_: Any, **__: Any) -> None:
        raise AttributeError("update cannot be used")

    def __reduce__(self) -> Any:
        return type(self), tuple(vars(self).values())


RESULTS: dict[str, Callable[..., Any]] = {
    "number": lambda net, x: Out(states(net, x)[-1], x.shape[0]),
    "input": lambda net, x: Out(states(net, x)[-1], x),
    "list": lambda net, x: Out(states(net, x), 1),
    "output": lambda net, x: Output(states(net, x)[-1]),
    "output, list": lambda net, x: Output(states(net, x)[-1], states(net, x)),
    "slice": lambda net, x: (states(net, x)[-1], slice(0, x.shape[0])),
    "range": lambda net, x: (states(net, x)[-1], range(x.shape[0])),
    "set": lambda net, x: (states(net, x)[-1], {x.shape[0]}),
    "defaultdict": lambda net, x: collections.defaultdict(list, a=states(net, x)),
    "plain object": lambda net, x: np.array([x.shape[0]]),
}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.allclose(found, expected, rtol=0, atol=1e-11)
    if dataclasses.is_dataclass(expected):
        kept = not isinstance(found, Output) or all(vars(found)[name] is item for name, item in found.items())
        return kept and type(found) is type(expected) and same(vars(found), vars(expected))
    if isinstance(expected, dict):
        return type(found) is type(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and bool(found == expected)


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", RESULTS)
def test_results_of_any_type_are_right_or_refused(name: str) -> None:
    net, x = Net(RESULTS[name]), torch.randn(40, 2, 2)
    try:
        found = reroll.compile(net, **EAGER)(x)
    except (RerollError, torch._dynamo.exc.Unsupported):
        assert name in ("set", "plain object")
        return
    assert same(found, net(x))


def keeps_row(net: Any, x: Tensor) -> list[Tensor]:
    found = states(net, x)
    net.second = found[1]
    return found


def logs(net: Any, x: Tensor) -> Tensor:
    LOG.append(x.shape[0])
    return states(net, x)[-1]


def test_a_row_may_be_kept_in_an_attribute() -> None:
    net = Net(keeps_row, second=None)
    run = reroll.compile(net, **EAGER)
    for steps in (40, 9, 25):
        reroll.check(run, torch.randn(steps, 2, 2), strict=True, measure=False)


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
@pytest.mark.parametrize("body", [logs, lambda net, x: states(net, x)[-1] * next(net.count)])
def test_state_of_lists_and_iterators_is_that_of_each_call(body: Callable[..., Any]) -> None:
    net: Any = Net(body)
    xs, found = [torch.randn(steps, 2, 2) for steps in (40, 9, 40)], list[Any]()
    for compiles in (True, False):
        LOG.clear()
        net.count = itertools.count(1)
        run: Any = reroll.compile(net, **EAGER) if compiles else net
        found.append(list[Any]())
        for x in xs:
            net.zero_grad()
            y = run(x)
            y.square().sum().backward()
            found[-1] += [
                y.detach(),
                *(value.grad.clone() for value in net.parameters() if value.grad is not None),
                *LOG,
            ]
        found[-1].append(next(net.count))
    torch.testing.assert_close(*found)


def test_attributes_are_set_on_the_model_and_torch_can_be_told_to_run_it() -> None:
    net = Net(lambda net, x: states(net, x)[-1] * net._gain, _gain=2.0)
    fast, x = reroll.compile(net, **EAGER), torch.randn(40, 2, 2)
    fast._gain = 3.0
    assert net._gain == 3.0
    del fast._gain
    fast._gain = 1.0
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(fast(x), net(x))
    with torch.inference_mode():
        assert torch.equal(fast(x), net(x))
