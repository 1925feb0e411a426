"""Loops that are written in odd ways, and steps that are odd: equal to eager's at every length, and rolled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import reroll


class Cell(nn.Module):
    """A loop of a GRU's cell over time, the first dimension, in a way that is told."""

    def __init__(self, loop: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.cell, self.loop = nn.GRUCell(4, 4), loop

    def forward(self, x: Tensor) -> Any:
        return self.loop(self.cell, x)


def agree(model: nn.Module, fast: Any, *args: Any) -> None:
    """Results and gradients of a compiled model are eager's, in float64."""
    results, grads = [], []
    for each in (fast, model):
        result = each(*args)
        results.append(result)
        total = result.sum() if isinstance(result, Tensor) else sum(part.sum() for part in result)
        grads.append(torch.autograd.grad(total, [*model.parameters()], allow_unused=True))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def compiled(model: Any, **how: Any) -> Any:
    """A model compiled in float64."""
    torch.manual_seed(0)
    return reroll.compile(model.double() if isinstance(model, nn.Module) else model, lowering="eager", **how)


def rows(*sizes: int) -> Tensor:
    """Input in float64."""
    return torch.randn(*sizes, dtype=torch.float64)


@pytest.mark.parametrize(("every", "steps"), [(7, 50), (10, 60), (20, 130)])
def test_what_is_done_at_every_kth_step_is_rolled(every: int, steps: int) -> None:
    def loop(cell: nn.Module, x: Tensor) -> Any:
        h, saved = torch.zeros_like(x[0]), []
        for n in range(x.shape[0]):
            h = cell(x[n], h)
            if n % every == 0:
                saved.append(h[:, 0])
        return h, torch.stack(saved)

    model = Cell(loop)
    fast, x = compiled(model), rows(steps, 2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(model, fast, x)
    assert reroll.explain(fast, x).loops


def states(cell: nn.Module, x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        h = cell(x[t], h)
        out.append(h)
    return torch.stack(out)


@pytest.mark.parametrize("order", [(25, 9, 40), (9, 25)])
def test_the_first_eight_rows_are_right_in_any_order(order: tuple[int, ...]) -> None:
    model = Cell(lambda cell, x: states(cell, x)[:8].sum(0))
    fast = compiled(model)
    for steps in order:
        agree(model, fast, rows(steps, 2, 4))


@pytest.mark.parametrize("order", [(12, 13, 12), (13, 12, 13)])
def test_the_second_half_is_right_in_any_order(order: tuple[int, ...]) -> None:
    model = Cell(lambda cell, x: states(cell, x)[x.shape[0] // 2 :])
    fast = compiled(model)
    for steps in order:
        agree(model, fast, rows(steps, 2, 4))
    assert not fast.reroll_caller.is_read


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_compiled_model(warm: bool, reentrant: bool) -> None:
    model = Cell(states)
    fast, x = compiled(model), rows(12, 2, 4).requires_grad_()
    if warm:
        fast(x)
    found, expected = checkpoint(fast, x, use_reentrant=reentrant), model(x)
    torch.testing.assert_close(found, expected)
    for each in (found, expected):
        each.square().sum().backward()
    grads = [each.grad for each in model.parameters()]
    x_grad, x.grad = x.grad, None
    model.zero_grad()
    for _ in range(2):
        model(x).square().sum().backward()
    assert x_grad is not None
    torch.testing.assert_close(x_grad, x.grad)
    torch.testing.assert_close(grads, [each.grad for each in model.parameters()])


@pytest.mark.usefixtures("unproved")  # torch gives no gradients by name through them
@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_steps_that_are_checkpoints_which_are_entered_again(dropped: float, door: str) -> None:
    def loop(cell: nn.Module, x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[0]), []
        for t in range(x.shape[0]):
            h = checkpoint(lambda a, b: nn.functional.dropout(cell(a, b), dropped), x[t], h, use_reentrant=True)
            out.append(h)
        return torch.stack(out)

    model = Cell(loop)
    fast: Any = compiled(model)
    if door == "backend":
        fast = torch.compile(model, backend="reroll", options={"lowering": "eager"})
    x, found = rows(12, 2, 4).requires_grad_(), list[Any]()
    for each in (fast, model):
        torch.manual_seed(0)
        model.zero_grad()
        x.grad = None
        result = each(x)
        result.square().sum().backward()  # autograd.grad is what such checkpoints refuse
        found.append([result, x.grad, *(parameter.grad for parameter in model.parameters()), torch.rand(1)])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("form", ["squeeze_", "read later", "twice", "transpose_", "of a state"])
def test_a_shape_that_is_changed_in_place(form: str, door: str) -> None:
    def loop(cell: nn.Module, x: Tensor) -> Tensor:
        h = x.new_zeros(4, 4)
        for t in range(x.shape[0]):
            row = x[t : t + 1] + 0
            if form == "squeeze_":
                h = cell(row.squeeze_(0), h)
            elif form == "read later":
                torch.squeeze(row, 0).size()
                row.squeeze_(0)
                h = cell(row, h)
            elif form == "twice":
                h = cell(row.squeeze_(0).unsqueeze_(0)[0], h)
            elif form == "transpose_":
                h = cell(row.squeeze(0).t_(), h)
            else:
                h = cell(x[t], h).unsqueeze_(0).squeeze_(0)
        return h

    model = Cell(loop)
    fast = compiled(model)
    if door == "backend":
        fast = torch.compile(model, backend="reroll", options={"lowering": "eager"})
    for steps in (14, 9):
        agree(model, fast, rows(steps, 4, 4))


class Table(nn.Module):
    """A loop over a number of its own, with a parameter for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.T, self.w = 24, nn.Parameter(torch.rand(24))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(self.T):
            h = torch.tanh(h * self.w[t] + x[t])
        return h


def test_a_loop_over_a_number_of_the_models_own() -> None:
    model = Table()
    fast = compiled(model)
    for steps in (24, 9, 24):
        model.T = steps
        agree(model, fast, rows(24, 3))
    assert not fast.reroll_caller.is_read


class Window(nn.Module):
    """Reads the mean of the last 20 states."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(3, 5), []
        memory = h[None]
        for t in range(x.shape[0]):
            h = torch.tanh(self.a(x[t]) + self.b(memory.mean(0)))
            memory = torch.cat([memory, h[None]])[-20:]
            out.append(h)
        return torch.stack(out)


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
def test_a_memory_of_20_steps_is_right() -> None:
    model = Window()
    fast = compiled(model)
    for steps in (30, 12, 50):
        agree(model, fast, rows(steps, 3, 4))


class Decoder(nn.Module):
    """Ends when all sequences have, or does not."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.cell, self.ends = nn.GRUCell(4, 5), ends

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 5)
        for t in range(x.shape[0]):
            alive = t < lengths
            if self.ends and not alive.any():
                break
            h = torch.where(alive[:, None], self.cell(x[t], h), h)
        return h


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
@pytest.mark.parametrize("ends", [True, False])
def test_a_loop_that_ends_by_values(ends: bool) -> None:
    model = Decoder(ends)
    fast = compiled(model)
    for steps, lengths in ((12, [3, 5, 8]), (12, [3, 5, 8]), (12, [3, 11, 2]), (20, [20, 1, 4])):
        agree(model, fast, rows(steps, 3, 4), torch.tensor(lengths))
    assert fast.reroll_caller.is_read is ends


class Sampler(nn.Module):
    """Steps of a sampler, which reads a table at times that are tensors without dimensions, or all rows before."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.net, self.n, self.before = nn.Linear(5, 4), 12, before
        self.alphas: Tensor
        self.register_buffer("alphas", torch.linspace(0.999, 0.01, 1000))

    def forward(self, x: Tensor) -> Tensor:
        times, alphas = torch.linspace(999, 0, self.n).long(), self.alphas
        rows_ = alphas[times] if self.before else times
        for t, row in zip(times, rows_, strict=True):
            a = row if self.before else alphas[t]
            e = self.net(torch.cat([x, (t / 1000).expand(x.shape[0], 1).to(x.dtype)], -1))
            x = (x - (1 - a).sqrt() * e) * a.sqrt()
        return x


@pytest.mark.parametrize("before", [False, True])
def test_an_index_that_is_a_tensor(before: bool) -> None:
    model, x = Sampler(before), rows(3, 4)
    fast = compiled(model)
    for number in (12, 20, 12):
        model.n = number
        agree(model, fast, x)
    assert sum(loop.recurrence.steps for loop in reroll.explain(fast, x).loops) >= 10


class Marked(nn.Module):
    """From behind, the state before every twelfth step: at 12 steps that is the one before the first."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.cell, self.stacked = nn.GRUCell(4, 4), stacked

    def forward(self, x: Tensor) -> list[Tensor]:
        h, found = x.new_zeros(x.shape[1], 4), list[Tensor]()
        for t in reversed(range(x.shape[0])):
            if t % 12 == 11:
                found.append(h)
            h = self.cell(x[t], h)
        return [h, torch.stack(found)] if self.stacked and found else [h, *found]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("order", [(12, 13, 24, 11, 25), (13, 14, 12, 24, 36, 10)])
@pytest.mark.filterwarnings("ignore")
def test_a_row_before_the_first_is_not_the_last_one(order: tuple[int, ...], stacked: bool) -> None:
    model = Marked(stacked)
    fast = compiled(model, proof="never")
    for steps in order:
        agree(model, fast, rows(steps, 2, 4))


class Decaying(nn.Module):
    """Numbers of the step in what nothing reads, or in what is read as ``read`` says."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.fc, self.read = nn.Linear(4, 4, dtype=torch.float64), read

    def forward(self, x: Tensor) -> Any:
        h = unread = torch.zeros(3, 4, dtype=torch.float64)
        for t in range(x.shape[0]):
            h = torch.tanh(self.fc(x[t]) + h)
            unread = unread * 0.9**t + h
            if self.read == "asked":
                assert (h * 0.8**t < 9).all()
        if self.read == "list":
            return [h, unread.detach().sum().floor() * 0.0]
        return h


def test_numbers_that_nothing_reads_may_be_any() -> None:
    torch.manual_seed(0)
    run = reroll.compile(Decaying("never"), lowering="eager")
    for steps in (20, 31):
        x = torch.randn(steps, 3, 4, dtype=torch.float64, requires_grad=True)
        reroll.check(run, x, strict=True, measure=False)
    assert len(reroll.explain(run, x).loops) == 1


@pytest.mark.parametrize("read", ["list", "asked"])
@pytest.mark.filterwarnings("ignore:The model asks")
def test_numbers_that_are_read_are_right(read: str) -> None:
    torch.manual_seed(0)
    run = reroll.compile(Decaying(read), lowering="eager")
    for steps in (20, 31):
        x = torch.randn(steps, 3, 4, dtype=torch.float64, requires_grad=True)
        reroll.check(run, x, strict=True, measure=False)
