"""Carries lie in memory as in the user's program: random numbers, views and results are those of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

import reroll
from reroll.errors import RerollWarning
from reroll.graph.layouts import is_plain, lay_out, memory_order

D = torch.float64
Loop = Callable[[Tensor, Tensor, Tensor], Any]


def masked_first(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    """Contiguous from the second step on."""
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] @ w + dropout(h, 0.3)) + 0.1 * h
    return h


def masked_always(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    """As the first state lies."""
    for t in range(x.shape[0]):
        h = 0.9 * h + torch.tanh(x[t] @ w + dropout(h, 0.3))
    return h


def masked_delay(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    a, b = h, 2 * h
    for t in range(x.shape[0]):
        a, b = b, torch.tanh(x[t] @ w + dropout(a, 0.2)) + 0.1 * a
    return a, b


def turned(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    states = []
    for t in range(x.shape[0]):
        h = torch.tanh(h.t().view(4, 3) @ w[:3, :3] + dropout(x[t], 0.2).view(4, 3)).t()
        states.append(h)
    return h, h.t().view(-1), states[3].t().view(-1), torch.stack(states)


def restrided(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] @ w + (h * 0.5).as_strided((3, 4), (1, 3)))
    return h


def restrided_own(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    """The first state is made by the model, and lies in another way than all others."""
    h = (h.t() * 2.0).contiguous().t()
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] @ w + (h * 0.5).as_strided((3, 4), (1, 3)))
    return h


def flipping(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Transposed at every step: no layout is that of all steps, and none can be told."""
    p = h @ h.t()
    for t in range(x.shape[0]):
        h, p = torch.tanh(p @ h + x[t]), torch.tanh(p.t() + p @ x[t] @ w[:, :3])
    return h, p


def symmetric(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    p, found = h @ h.t(), x.new_zeros(9)
    for t in range(x.shape[0]):
        p = torch.tanh(0.5 * (p.t() + p) + x[t].mean())
        found = found + p.flatten() * torch.arange(9)
    return p, found


LOOPS = (masked_first, masked_always, masked_delay, turned, restrided, restrided_own, flipping, symmetric)


def inputs(transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    state = torch.randn(4, 3, dtype=D).t() if transposed else torch.randn(3, 4, dtype=D)
    x, w = torch.randn(9, 3, 4, dtype=D), torch.randn(4, 4, dtype=D)
    return x.requires_grad_(), w.requires_grad_(), state.requires_grad_()


def doors(loop: Loop) -> list[Any]:
    eager = {"lowering": "eager"}
    with_error: Any = {**eager, "on_no_recurrence": "error", "verify": True}
    double: Any = {**eager, "schedule": "double", "segment": 2, "chunk": 4, "slots": 2, "remote": "disk"}
    backends = [torch.compile(loop, backend="reroll", options=each) for each in (with_error, double)]
    return [*backends, reroll.compile(loop, lowering="eager")]


CASES = [(loop, transposed) for loop in LOOPS for transposed in (False, True) if transposed or loop is not turned]


@pytest.mark.variants(4)
@pytest.mark.parametrize(("loop", "transposed"), CASES)
def test_layouts_are_those_of_the_users_program(loop: Loop, transposed: bool) -> None:
    values = inputs(transposed)
    for model in doors(loop):
        torch.compiler.reset()
        reroll.check(model, *values, strict=True, measure=False)
        assert reroll.explain(model, *values).loops


@pytest.mark.parametrize("segment", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [8, 9, 10])
@pytest.mark.parametrize("given", [(0,), (1,), (0, 1)])
def test_what_a_gradient_reaches_is_followed_from_segment_to_segment(
    segment: int, steps: int, given: tuple[int, ...]
) -> None:
    """Two states in turn: in segments of two steps neither reaches the other, in those of one it reaches that alone."""
    x, w, h = inputs(False)
    x = x[:1].detach().repeat(steps, 1, 1).requires_grad_()
    torch.compiler.reset()
    options: Any = {"lowering": "eager", "segment": segment, "schedule": "store_all"}
    found = []
    for run in (masked_delay, torch.compile(masked_delay, backend="reroll", options=options)):
        torch.manual_seed(1)
        results = run(x, w, h)
        found.append(torch.autograd.grad([results[each].sin().sum() for each in given], [x, w, h]))
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain)


def flipping_masked(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    h = h @ h.t()
    for t in range(x.shape[0]):
        h = h.t() * 0.9 + dropout(h, 0.2) * x[t].mean()
    return h


def flipping_restrided(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    h = h @ h.t()
    for t in range(x.shape[0]):
        h = h.t() * 0.9 + (h * 0.5).as_strided((3, 3), (3, 1)) * x[t].mean()
    return h


def flipping_written(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    h = h @ h.t()
    for t in range(x.shape[0]):
        h = h.t() * 0.9
        h.as_strided((3,), (1,)).mul_(x[t].mean())
    return h


@torch.library.custom_op("tests_layouts::in_memory", mutates_args=())
def in_memory(value: Tensor) -> Tensor:
    """The numbers of a square matrix as they lie."""
    return value.as_strided(value.shape, (value.shape[0], 1)).clone()


@in_memory.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype)


in_memory.register_autograd(lambda ctx, grad: in_memory(grad))


def flipping_own(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    h = h @ h.t()
    for t in range(x.shape[0]):
        h = h.t() * 0.9 + torch.ops.tests_layouts.in_memory(h.t() * 0.5) * x[t].mean()
    return h


def past_the_carry(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    for t in range(x.shape[0]):
        h = 0.5 * (x[t] @ w) + 0.5 * h.as_strided((3, 4), (1, 3)) + 0.1 * h
    return h


@pytest.mark.variants(4)
@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (flipping_masked, "in another way at every step"),
        (flipping_restrided, "in another way at every step"),
        (flipping_written, "in another way at every step"),
        (flipping_own, "in another way at every step"),
        (past_the_carry, "as_strided of a value that"),
    ],
)
def test_what_cannot_be_kept_is_said_and_runs_as_it_is(loop: Loop, reason: str) -> None:
    options: Any = {"lowering": "eager"}
    for run in (torch.compile(loop, backend="reroll", options=options), reroll.compile(loop, **options)):
        torch.compiler.reset()
        with pytest.warns(RerollWarning, match=reason):
            reroll.check(run, *inputs(transposed=False), strict=True, measure=False)


def test_orders_of_memory() -> None:
    x = torch.empty(2, 3, 4)
    assert is_plain(memory_order(x))
    assert is_plain(memory_order(x[:, :1]))
    assert is_plain(memory_order(torch.empty(3, 1).expand(3, 4)))
    assert is_plain(memory_order(torch.empty(4, 1).t()))
    assert memory_order(x.permute(2, 0, 1)) == (1, 2, 0)
    assert memory_order(torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert memory_order(x.transpose(0, 2)[:, :2]) == (2, 1, 0)


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 1, 0), (0, 2, 1)])
def test_operations_that_lay_out(order: tuple[int, ...]) -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = torch.empty(2, 3, 4)
    made = lay_out(graph, node, order)
    graph.output(made)
    x = torch.randn(2, 3, 4)
    result = torch.fx.GraphModule({}, graph)(x)
    assert torch.equal(result, x)
    assert memory_order(result) == order == memory_order(made.meta["example_value"])


def test_no_node_says_that_it_comes_from_no_line() -> None:
    """Torch joins the lines of nodes when it compiles what is around the loop, and raised a TypeError for None."""

    def turned(x_TBH: Tensor, h_HB: Tensor) -> Tensor:
        c_BH = h_HB.t()
        for x_BH in x_TBH.unbind(0):
            c_BH = torch.tanh(c_BH + x_BH)
        return c_BH

    fast = torch.compile(turned, backend="reroll", options={"lowering": "eager"})
    found = reroll.explain(fast, torch.randn(9, 3, 4), torch.randn(4, 3).requires_grad_())
    assert [node for node in found.outer.nodes if node.meta.get("stack_trace", "") is None] == []
