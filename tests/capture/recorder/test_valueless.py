"""Results without values: like the ones that torch gives in all but their values, and never where a value is asked."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported, UserError
from torch.nn import functional as F

import reroll
from reroll.backends.front import observe
from reroll.backends.front.calls.arguments import Time, find_time
from reroll.capture.recorder import valueless
from reroll.capture.recorder.events import Recorder, recording
from reroll.capture.recorder.valueless import NeedsValues, Valueless
from reroll.graph.private import TorchDispatchMode, storage_id

X, Y, W = torch.randn(4, 6), torch.rand(4, 6), torch.randn(6, 6)
IMAGE, KERNEL, ROWS = torch.randn(2, 3, 8, 8), torch.randn(5, 3, 3, 3), torch.randn(9, 4, 6)
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "operators": lambda x, y, w: (
        x + y,
        x - 1,
        2 - x,
        x * y,
        x / 3,
        1 / y,
        -x,
        y**2,
        2**x,
        x @ w,
        abs(x),
        x % 2,
        x // 2,
    ),
    "broadcasts": lambda x, y, w: (x + y[:1], x[:, :1] * w[0], torch.where(x > 0, x, y[:1]), x.lerp(y, 0.5)),
    "numbers": lambda x, y, w: (torch.clamp(x, -1, 1), x.masked_fill(y > 0.5, 0.0), x.pow(3), x.addcmul(y, y, value=2)),
    "layouts": lambda x, y, w: (
        torch.sigmoid(x.t()),
        x.t() + y.t(),
        x.t() + 0 * y.t().contiguous(),
        x.t().contiguous(),
    ),
    "own memory": lambda x, y, w: (
        x.clone(),
        x.t().reshape(3, 8),
        x[:, ::2].flatten(),
        x.double(),
        x.to(torch.float64),
    ),
    "none of it": lambda x, y, w: (x.contiguous(), x.float(), x.reshape(8, 3), x.flatten(), F.dropout(x, 0.5, False)),
    "sums": lambda x, y, w: (x.sum(), x.sum(0), x.mean(1, keepdim=True), x.amax(0), x.logsumexp(1), x.std(0), x.norm()),
    "softmax": lambda x, y, w: (x.softmax(1), F.log_softmax(x, 0), x.cumsum(1), F.glu(x, 1)),
    "products": lambda x, y, w: (
        F.linear(x, w, w[0]),
        torch.einsum("ij,kj->ik", x, y),
        torch.addmm(w[0], x, w),
        w.mv(x[0]),
    ),
    "norms": lambda x, y, w: (F.layer_norm(x, (6,)), F.batch_norm(x, None, None, training=True), F.normalize(x)),
    "joined": lambda x, y, w: (torch.cat([x, y], 1), torch.stack([x, y]), F.pad(x, (1, 1)), x.roll(1, 0), x.flip(0)),
    "drawn": lambda x, y, w: (
        F.dropout(x, 0.3, True),
        F.gelu(x),
        F.mse_loss(x, y),
        F.softplus(x),
        F.leaky_relu(x, 0.1),
    ),
    "images": lambda x, y, w: (
        F.conv2d(IMAGE * w[0, 0], KERNEL, padding=1),
        F.avg_pool2d(IMAGE, 2),
        F.relu(IMAGE[:, 1:]),
    ),
    "masks": lambda x, y, w: ((x > y).float(), (x > y).to(x.dtype), x * (y > 0.5), torch.logical_and(x > 0, y > 0)),
    "cells": lambda x, y, w: torch.lstm_cell(
        x, (y, y), w.repeat(4, 1), w.repeat(4, 1), w.repeat(4, 1)[:, 0], w.repeat(4, 1)[:, 1]
    ),
    "attention": lambda x, y, w: (F.scaled_dot_product_attention(x[None], y[None], y[None]), torch.outer(x[0], y[0])),
}


def run(function: Callable[..., Any], operands: tuple[Tensor, ...], valueless: Valueless | None) -> list[Any]:
    """What a function gives when it is done twice, under a recorder."""
    with recording(Recorder(lambda *_: None, {}, valueless=valueless)):
        function(*operands)
        return list(function(*operands))


def described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    mine = [value.shape, value.stride(), value.dtype, value.requires_grad, value.is_leaf, value._base is None]
    return tuple(mine)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_like_torchs_in_all_but_their_values(name: str, grad: bool) -> None:
    operands = tuple(each.clone().requires_grad_(grad) for each in (X, Y, W))
    for modes in (torch.enable_grad, torch.no_grad):
        with modes():
            expected = run(OPERATIONS[name], operands, None)
            found = run(OPERATIONS[name], operands, Valueless())
        assert [*map(described, found)] == [*map(described, expected)]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_whole_loops_give_rows_of_all_steps(kind: str, batch_first: bool) -> None:
    for layers, both in itertools.product((1, 2), (False, True)):
        model = getattr(nn, kind)(6, 5, layers, batch_first=batch_first, bidirectional=both)
        expected, found = (run(model, (ROWS,), each) for each in (None, Valueless()))
        flat = [[one[0], *(one[1] if isinstance(one[1], tuple) else [one[1]])] for one in (found, expected)]
        assert [described(each)[:-1] for each in flat[0]] == [described(each)[:-1] for each in flat[1]], (layers, both)


class Counted(TorchDispatchMode):
    """Counts products and activations that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done += any(name in str(func) for name in ("mm", "tanh", "sigmoid", "convolution"))
        return func(*args, **(kwargs or {}))


class Cells(nn.Module):
    """A cell of torch's, one written out, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.linear, self.conv = nn.GRUCell(6, 6), nn.Linear(6, 6), nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = g = torch.zeros(x.shape[1], 6)
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            g = torch.tanh(self.linear(g) + h) + self.conv(g[:, None])[:, 0]
        return g


def test_a_new_length_computes_a_few_steps_alone() -> None:
    model, counts = Cells(), list[int]()
    for length in (60, 240):
        call = find_time(model, inspect.signature(model.forward), Time(0), (torch.randn(length, 3, 6),), {})
        pattern = observe.probe(model, call, (6, 7, 9), ("float",), 1)
        with Counted() as plain:
            call.run(model)
        with Counted() as followed:
            observe._follow(model, call, pattern)
        assert plain.done >= 3 * length
        counts.append(followed.done)
    assert counts[0] == counts[1] < 20


def late(x: Tensor, asks: Callable[[Tensor, int], Any]) -> Tensor:
    """A loop that asks for something at step 50, which no short run sees."""
    h = x.new_zeros(x.shape[1:])
    for t in range(x.shape[0]):
        h = torch.tanh(0.5 * h + x[t])
        if t == 50:
            h = h + asks(h, t)
    return h


ASKS: dict[str, Callable[[Tensor, int], Any]] = {
    "a number": lambda h, t: 1.0 if h.sum().item() > 0 else 2.0,
    "a truth": lambda h, t: 1.0 if (h.sum() > 0) else 2.0,
    "a float": lambda h, t: float(h[0, 0]),
    "a list": lambda h, t: h.sum(0).tolist()[0],
    "an array": lambda h, t: float(h.detach().numpy().sum()),
    "an array by numpy": lambda h, t: float(np.asarray(h.detach()).sum()),
    "a mask": lambda h, t: h[h > 0].sum(),
    "places": lambda h, t: len(torch.nonzero(h > 0)),
    "places by where": lambda h, t: len(torch.where(h > 0)[0]),
    "a text": lambda h, t: float(len(str(h)) > 0),
    "equal": lambda h, t: float(torch.equal(h, h)),
    "an index": lambda h, t: [1.0, 2.0][int(h[0, 0] > 0)],
    "a size": lambda h, t: torch.zeros(int((h > 0).sum())).sum(),
    "memory": lambda h, t: float(h.data_ptr() > 0),
}


@pytest.mark.parametrize("name", ASKS)
def test_values_that_are_asked_for_late_are_asked_of_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run without values ends there, and what is said is what was said with values alone."""
    call = find_time(late, inspect.signature(late), Time({"x": 0}), (torch.randn(60, 3, 4), ASKS[name]), {})
    pattern, told = observe.probe(late, call, (6, 7, 9), ("float",), 1), list[str]()
    for serves in (valueless.serves, lambda _: False):
        monkeypatch.setattr(observe, "serves", serves)
        with pytest.raises(reroll.LengthError) as error:
            observe._follow(late, call, pattern)
        told.append(str(error.value))
    assert told[0] == told[1]
    assert "At 60 steps the model does not go on as" in told[0]


@pytest.mark.parametrize("name", [name for name in ASKS if name != "memory"])
def test_no_value_is_shown(name: str) -> None:
    with pytest.raises(NeedsValues), recording(Recorder(lambda *_: None, {}, valueless=Valueless())):
        ASKS[name](torch.tanh(X), 0)


def test_an_error_without_values_is_none() -> None:
    """Two tensors without values share memory: torch does not add parts of one to other parts of it in place."""

    def model(x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 6)
        for t in range(x.shape[0]):
            one, other = 0.5 * (h + x[t]), 0.5 * (h - x[t])
            one[:2] += other[1:3]
            h = torch.tanh(one)
        return h

    x = torch.randn(50, 3, 6, requires_grad=True)
    found, expected = (each(x) for each in (reroll.compile(model, time_dim=0, lowering="eager"), model))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(each.sum(), x)[0] for each in (found, expected)), rtol=1e-6, atol=1e-6
    )


class Kept(nn.Module):
    """A model whose state changes at every step: buffers by an update, and statistics of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.count = nn.BatchNorm1d(6), 0
        self.total: Tensor
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = x[0] * 0
        for t in range(x.shape[0]):
            h = torch.tanh(self.norm(h + x[t]))
            self.total += h.detach().mean(0)
        return h


def test_state_is_that_of_one_run_with_values() -> None:
    torch.manual_seed(0)
    model, plain, x = Kept(), Kept(), torch.randn(40, 5, 6)
    plain.load_state_dict(model.state_dict())
    fast = reroll.compile(model, time_dim=0, lowering="eager")
    for length in (40, 31):
        torch.testing.assert_close(fast(x[:length]), plain(x[:length]))
        for one, other in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other)


def test_transforms_are_run_with_values() -> None:
    with pytest.raises(NeedsValues), recording(Recorder(lambda *_: None, {}, valueless=Valueless())):
        torch.vmap(torch.tanh)(X)


@torch.jit.script
def positive(value: Tensor) -> bool:
    return bool(value > 1e-6)


def caught(value: Tensor) -> bool:
    try:
        return float(value) > 1e-6
    except BaseException:  # noqa: BLE001  # as a model may
        return False


def elsewhere(value: Tensor) -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: float(value)).result() > 1e-6


def unseen(value: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return float(value) > 1e-6


class Hidden(nn.Module):
    """From step 50 on it doubles its state where a value is positive, which it always is; it asks in secret."""

    def __init__(self, ask: Callable[[Tensor], bool] | None) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(4, 4), ask
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))
        self.memory = memoryview(self.seen.numpy())

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 4) + 0.1
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + self.linear(h))
            total = h.detach().abs().sum()
            self.seen.copy_(total)
            if t > 50 and (self.memory[0] > 1e-6 if self.ask is None else self.ask(total)):
                h = h * 2
        return h


@pytest.mark.variants(4)
@pytest.mark.parametrize("ask", [caught, positive, elsewhere, unseen, None])
def test_values_that_are_read_in_secret_are_no_zeros(ask: Any) -> None:
    """What is not seen either where values are computed is as likely to be right without."""
    torch.manual_seed(0)
    model, x = Hidden(ask), torch.randn(80, 3, 4)
    expected = torch.autograd.grad(model(x).sum(), model.linear.weight)[0]
    try:
        found = torch.autograd.grad(reroll.compile(model, time_dim=0, lowering="eager")(x).sum(), model.linear.weight)[
            0
        ]
    except (reroll.RerollError, UserError, Unsupported):
        return
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_value_that_was_asked_for_and_caught_is_not_forgotten() -> None:
    valueless = Valueless()
    with recording(Recorder(lambda *_: None, {}, valueless=valueless)):
        assert not caught(X.abs().sum())
        with pytest.raises(NeedsValues):
            X + 1
    assert valueless.asked


def test_updates_of_what_others_see_are_made_with_values() -> None:
    with recording(Recorder(lambda *_: None, {}, valueless=Valueless(frozenset({storage_id(X)})))):
        X.clone().add_(1)
        with pytest.raises(NeedsValues):
            X[0].add_(1)


@pytest.mark.parametrize("name", ["zeros", "a bound", "where", "narrow", "arange", "view"])
def test_numbers_of_tensors_are_no_sizes(name: str) -> None:
    n: Any = torch.tensor(3)
    asks: dict[str, Callable[[], Any]] = {
        "zeros": lambda: torch.zeros(n),
        "a bound": lambda: X[: (X > 0).sum()],
        "where": lambda: torch.where(condition=X > 0),
        "narrow": lambda: X.narrow(0, 0, n),
        "arange": lambda: torch.arange(n),
        "view": lambda: X.view(n, 8),
    }
    with pytest.raises(NeedsValues), recording(Recorder(lambda *_: None, {}, valueless=Valueless())):
        asks[name]()


def test_a_run_that_ends_in_a_block_without_gradients_leaves_them_on() -> None:
    def model(x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1:])
        for t in range(x.shape[0]):
            h = torch.tanh(0.5 * h + x[t])
            if t == 50:
                with torch.no_grad():
                    h *= 1.5
        return h

    call = find_time(model, inspect.signature(model), Time(0), (torch.randn(60, 3, 4),), {})
    pattern = observe.probe(model, call, (6, 7, 9), ("float",), 1)
    with pytest.raises(reroll.LengthError):
        observe._follow(model, call, pattern)
    assert torch.is_grad_enabled()


def test_blocks_without_gradients_are_run_without_values() -> None:
    def model(x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1:])
        for t in range(x.shape[0]):
            with torch.no_grad():
                scale = h.abs().mean()
            h = torch.tanh(0.5 * h + x[t]) * scale
        return h

    call = find_time(model, inspect.signature(model), Time(0), (torch.randn(60, 3, 4),), {})
    pattern = observe.probe(model, call, (6, 7, 9), ("float",), 1)
    assert valueless.serves(pattern.palette)
    observe._run_along(model, call, pattern, valueless=True)
