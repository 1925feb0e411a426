"""Rows that are written into a tensor, as the recurrences of linear attention write them, are the outputs of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll

Write = Callable[[Tensor, int, Tensor], Any]


def indexed(o: Tensor, i: int, y: Tensor) -> None:
    o[:, :, i] = y


def from_the_end(o: Tensor, i: int, y: Tensor) -> None:
    o[..., i - o.shape[2], :] = y


def a_slice(o: Tensor, i: int, y: Tensor) -> None:
    o[:, :, i : i + 1] = y.unsqueeze(2)


def part_of_a_slice(o: Tensor, i: int, y: Tensor) -> None:
    o[:, :2, i : i + 1, 1:] = y[:, :2, None, 1:]


def added_to_a_slice(o: Tensor, i: int, y: Tensor) -> None:
    o[:, :, i : i + 1] += y.unsqueeze(2)


def selected(o: Tensor, i: int, y: Tensor) -> None:
    o.select(2, i).copy_(y)


def narrowed(o: Tensor, i: int, y: Tensor) -> None:
    o.narrow(2, i, 1).copy_(y.unsqueeze(2))


def by_index_copy(o: Tensor, i: int, y: Tensor) -> None:
    o.index_copy_(2, torch.tensor([i]), y.unsqueeze(2))


class GatedDeltaRule(nn.Module):
    """fla's ``naive_recurrent_gated_delta_rule``: the rows are written into what ``torch.zeros(...).to(v)`` gives."""

    def __init__(self, write: Write, transposed: bool = False) -> None:
        super().__init__()
        self.write, self.transposed, self.scale = write, transposed, nn.Parameter(torch.tensor(0.7))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, beta, g = (x.transpose(1, 2) for x in (q, k, v, beta, g))
        batch, heads, steps, width = k.shape
        o = torch.zeros_like(v) if self.transposed else torch.zeros(batch, heads, steps, v.shape[-1]).to(v)
        state = torch.zeros(batch, heads, width, v.shape[-1]).to(v)
        q = q * self.scale
        for i in range(steps):
            state = state.clone() * g[:, :, i].exp()[..., None, None]
            delta = (v[:, :, i].clone() - (state.clone() * k[:, :, i][..., None]).sum(-2)) * beta[:, :, i][..., None]
            state = state.clone() + k[:, :, i].unsqueeze(-1) * delta.unsqueeze(-2)
            self.write(o, i, torch.einsum("bhd,bhdm->bhm", q[:, :, i], state))
        return o.transpose(1, 2).contiguous(), state


def inputs(steps: int) -> list[Tensor]:
    shapes = [(2, steps, 3, 4), (2, steps, 3, 4), (2, steps, 3, 5), (2, steps, 3), (2, steps, 3)]
    return [(0.5 * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]


def seen(run: Callable[..., Any], model: nn.Module, given: list[Tensor]) -> tuple[Any, list[Tensor]]:
    results = run(*given)
    loss = torch.stack([result.square().sum() for result in results]).sum()
    return results, list(torch.autograd.grad(loss, [*given, *model.parameters()]))


@pytest.mark.parametrize("door", ["reroll", "backend"])
@pytest.mark.parametrize(
    "write", [indexed, from_the_end, a_slice, part_of_a_slice, added_to_a_slice, selected, narrowed, by_index_copy]
)
def test_rows_of_the_gated_delta_rule(write: Write, door: str) -> None:
    model, given = GatedDeltaRule(write).double(), inputs(9)
    run: Any = (
        reroll.compile(model, lowering="eager")
        if door == "reroll"
        else torch.compile(model, backend="reroll", options={"lowering": "eager"})
    )
    expected, wanted = seen(model, model, given)
    results, found = seen(run, model, given)
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert [loop.recurrence.steps for loop in reroll.explain(run, *given).loops] == [9]


def test_rows_lie_as_the_tensor_they_were_written_into() -> None:
    model, given = GatedDeltaRule(indexed, transposed=True).double(), inputs(9)
    run = reroll.compile(model, lowering="eager")
    expected, wanted = seen(model, model, given)
    results, found = seen(run, model, given)
    assert [each.stride() for each in results] == [each.stride() for each in expected]
    torch.testing.assert_close((*results, *found), (*expected, *wanted), rtol=1e-12, atol=1e-12)


def never_written(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    rows = torch.zeros(len(x) + 1, *x.shape[1:], dtype=x.dtype)
    for t in range(len(x)):
        rows[t + 1] = torch.tanh(x[t] + rows[t].clone() @ w)
    return rows, rows[0], rows[-1]


def written_once(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y, h = x * w.sum(), torch.zeros_like(x[0])
    y[0] = 0.0
    for row in x:
        h = torch.tanh(row + h @ w)
    return y[0], h


def written_in_steps(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h, rows = torch.zeros_like(x[0]), []
    for row in x:
        z = torch.tanh(row + h @ w) * 0.7
        h = z * 0.5
        z[0] = 1
        rows.append(z[0])
    return h, *rows


def written_in_stacked_steps(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h, *rows = written_in_steps(x, w)
    return h, torch.stack(rows)


def written_as_a_whole(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h, _ = written_in_stacked_steps(x, w)
    made = h * 2
    made.fill_(0.5)
    return h, made, made[0]


@pytest.mark.parametrize("door", ["reroll", "backend"])
@pytest.mark.parametrize(
    "model", [never_written, written_once, written_in_steps, written_in_stacked_steps, written_as_a_whole]
)
def test_a_constant_row_that_is_a_result_needs_the_gradient_of_its_tensor(model: Callable[..., Any], door: str) -> None:
    options: Any = {"lowering": "eager", "proof": "never"}
    run = (
        reroll.compile(model, **options)
        if door == "reroll"
        else torch.compile(model, backend="reroll", options=options)
    )
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    for steps in (12, 8):
        x = torch.randn(steps, 4, 3, dtype=torch.float64)
        results, expected = run(x, w), model(x, w)
        torch.testing.assert_close(results, expected)
        for mine, plain in zip(results, expected, strict=True):
            grads = [torch.autograd.grad(each.sum(), w, retain_graph=True)[0] for each in (mine, plain)]
            torch.testing.assert_close(*grads)
    assert reroll.explain(run, x, w).loops


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_what_is_written_over_reaches_what_it_does_in_torch(lowering: Any) -> None:
    """With zeros; others have no gradient at all."""

    def model(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h, made = torch.zeros_like(x[0]), []
        for row in x.detach():
            h = torch.tanh(row + h @ w)
            made.append(h * 2)
            made[-1].fill_(0.5)
        return torch.stack(made), h * v

    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((12, 4, 3), (3, 3), (3,))]
    run: Any = reroll.compile(model, lowering=lowering)
    for made, plain in zip(run(*given), model(*given), strict=True):
        found, expected = (
            torch.autograd.grad(y.sum(), given, retain_graph=True, allow_unused=True) for y in (made, plain)
        )
        assert [each is None for each in found] == [each is None for each in expected]
        torch.testing.assert_close([each for each in found if each is not None], [e for e in expected if e is not None])
    assert reroll.explain(run, *given).loops
