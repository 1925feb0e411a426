"""Linear carries: which are found, that k steps of them are those one by one, and what is never stepped over.

Shape letters: B batch, I inputs (INPUTS), N heads, D rows, E columns of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from agreement import compare
from captured import captured
from reroll.planning.options import Options
from reroll.planning.segments import usual_segment
from reroll.program.context import Context
from reroll.program.registry import run_on_step
from reroll.schedules.named import tree
from reroll.schedules.problem import Problem
from reroll.segment.linear import cores as cores_module
from reroll.segment.linear.cores import candidates
from reroll.segment.trace import linear_carries, trace

pytestmark = pytest.mark.usefixtures("double_precision", "small")
B, INPUTS, N, D, E, T = 2, 5, 3, 16, 18, 11
State = tuple[Tensor, ...]
Step = Callable[["Loop", Tensor, Any], tuple[Any, Any]]


class Loop(nn.Module):
    """A loop over a step, which gives the next state and an output."""

    def __init__(self, step: Step, *sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.of, self.sizes = step, sizes
        self.q, self.k, self.v = nn.Linear(INPUTS, N * D), nn.Linear(INPUTS, N * D), nn.Linear(INPUTS, N * E)
        self.gate, self.rows, self.out = nn.Linear(INPUTS, N), nn.Linear(INPUTS, N * D), nn.Linear(N * E, N * D)
        self.decay = nn.Parameter(torch.rand(N))

    def read(self, x_BI: Tensor) -> State:
        """Query, key and value of each head."""
        return self.q(x_BI).view(-1, N, D), self.k(x_BI).view(-1, N, D), self.v(x_BI).view(-1, N, E)

    def forward(self, x_TBI: Tensor) -> Any:
        """All outputs, and the last state."""
        state: Any = tuple(torch.ones(size) for size in self.sizes)
        state, ys = state if len(state) > 1 else state[0], []
        for t in range(x_TBI.shape[0]):
            state, y = self.of(self, x_TBI[t], state)
            ys.append(y)
        return torch.stack(ys), state


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small states be done together, too."""
    monkeypatch.setattr(cores_module, "LEAST", D)


def attention(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    q, k, v = net.read(x_BI)
    s = s + k[..., None] * v[..., None, :]
    return s, torch.einsum("bnd,bnde->bne", q, s)


def retention(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """A decay for each head, read by a product of matrices before the update."""
    q, k, v = net.read(x_BI)
    y = (q[:, :, None] @ s).squeeze(2)
    return torch.sigmoid(net.decay)[:, None, None] * s + torch.einsum("bnd,bne->bnde", k, v), y


def gated(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """A gate for each head that depends on the input, and what is read scaled and gated once more."""
    q, k, v = net.read(x_BI)
    g = torch.sigmoid(net.gate(x_BI))[..., None, None]
    s = g * s + (1 - g) * (k.unsqueeze(-1) * v.unsqueeze(-2))
    return s, (s * q[..., None]).sum(2) / 4 * torch.tanh(v)


def by_rows(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """A gate for each row, as gated linear attention has it."""
    q, k, v = net.read(x_BI)
    s = s * torch.sigmoid(net.rows(x_BI)).view(-1, N, D, 1) + torch.matmul(k[..., None], v[..., None, :])
    return s, torch.einsum("bnde,bnd->bne", s, q)


def columns(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """Rows are read, with gates of their own: a sum over columns."""
    q, k, v = net.read(x_BI)
    s = s * torch.sigmoid(net.gate(x_BI)).view(-1, N, 1, 1) - k[..., None] * v[..., None, :]
    return s, ((s * torch.sigmoid(net.rows(x_BI)).view(-1, N, D, 1)) @ v[..., None]).squeeze(-1) * q


def turned(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """Heads behind the matrix, which is transposed for the product."""
    q, k, v = net.read(x_BI)
    s = s / 2.0 + (k[..., None] * v[..., None, :]).permute(0, 2, 3, 1)
    return s, torch.matmul(s.permute(0, 3, 2, 1), q[..., None]).flatten(1)


def normed(net: Loop, x_BI: Tensor, state: State) -> Any:
    """A vector beside the matrix by which what is read is divided."""
    (s, z), (q, k, v) = state, net.read(x_BI)
    k = nn.functional.elu(k) + 1
    s, z = s + k[..., None] * v[..., None, :], z + k
    return (s, z), torch.einsum("bnd,bnde->bne", q, s) / (1 + (q * z).sum(-1, keepdim=True).abs())


def two(net: Loop, x_BI: Tensor, state: State) -> Any:
    """A second one that reads what the first one gives, with a recurrent unit between them."""
    (s, h, r), (q, k, v) = state, net.read(x_BI)
    s = 0.9 * s + k[..., None] * v[..., None, :]
    h = torch.tanh(h + net.out(torch.einsum("bnd,bnde->bne", q, s).flatten(1)))
    r = r + h.view(-1, N, D)[..., None] * v[..., None, :]
    return (s, h, r), torch.einsum("bnd,bnde->bne", q, r)


def both(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """Read twice, before and behind the update; the decay behind the sum."""
    q, k, v = net.read(x_BI)
    before = torch.einsum("bnd,bnde->bne", q, s)
    s = (s + k[..., None] * v[..., None, :]) * torch.sigmoid(net.gate(x_BI))[..., None, None]
    return s, before * torch.einsum("bnd,bnde->bne", k, s)


def covariance(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """Nothing is read before the end; no batch."""
    _, k, v = net.read(x_BI)
    return 0.5 * s + torch.outer(k[0, 0], v[0, 0]), k.sum()


def chained(net: Loop, x_BI: Tensor, state: State) -> Any:
    """What one gives before its update, seen through a view, is written to another one, and asks it, too."""
    (s, r), (q, k, v) = state, net.read(x_BI)
    y = torch.einsum("bnd,bnde->bne", q, s)
    s = 0.5 * s + k[..., None] * v[..., None, :]
    r = 0.9 * r + k[..., None] * y.unsqueeze(2)
    return (s, r), torch.einsum("bnd,bnde->bne", y.clone()[..., :D] * q, r)


def scaled(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """Numbers in all places, also none at all."""
    q, k, v = net.read(x_BI)
    s = 2.0 * s / 3 + 0.5 * (k[..., None] * v[..., None, :]) / 4.0
    return s, ((s * q[..., None]) / 2.0).sum(2)


def rotated(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """What is read is looked at as it lies in memory."""
    q, k, v = net.read(x_BI)
    s = s + (k[..., None] * v[..., None, :]).permute(0, 2, 3, 1)
    y = torch.einsum("bden,bnd->ben", s, q)
    pairs = torch.view_as_real(torch.view_as_complex(y[..., :2].contiguous()))
    return s, torch.as_strided(y, (B, 9), (E * N, 2)).sum(1) * pairs.sum((1, 2))


HEADS, FLAT = (B, N, D, E), (D, E)
LINEAR: dict[str, tuple[Step, tuple[Any, ...], list[int]]] = {
    "attention": (attention, (HEADS,), [0]),
    "retention": (retention, (HEADS,), [0]),
    "gated": (gated, (HEADS,), [0]),
    "columns": (columns, (HEADS,), [0]),
    "turned": (turned, ((B, D, E, N),), [0]),
    "normed": (normed, (HEADS, (B, N, D)), [0]),
    "two": (two, (HEADS, (B, N * D), HEADS), [0, 2]),
    "both": (both, (HEADS,), [0]),
    "covariance": (covariance, (FLAT,), [0]),
    "chained": (chained, (HEADS, HEADS), [0, 1]),
    "scaled": (scaled, (HEADS,), [0]),
    "rotated": (rotated, ((B, D, E, N),), [0]),
}


class Reversed(torch.autograd.Function):
    """Gives its operand, and turns its gradient around."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -2.0 * grad


def reversed_state(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    q, k, v = net.read(x_BI)
    s = Reversed.apply(s) + k[..., None] * v[..., None, :]  # type: ignore[no-untyped-call]
    return s, torch.einsum("bnd,bnde->bne", q, s)


def cut(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    q, k, v = net.read(x_BI)
    s = 0.9 * s.detach() + k[..., None] * v[..., None, :]
    return s, torch.einsum("bnd,bnde->bne", q, s)


def delta(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """The delta rule: what is written depends on the state."""
    q, k, v = net.read(x_BI)
    k = k / k.norm(dim=-1, keepdim=True)
    s = s + k[..., None] * (v - torch.einsum("bnd,bnde->bne", k, s))[..., None, :]
    return s, torch.einsum("bnd,bnde->bne", q, s)


def bent(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    q, k, v = net.read(x_BI)
    s = torch.tanh(s) + k[..., None] * v[..., None, :]
    return s, torch.einsum("bnd,bnde->bne", q, s)


def seen(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """All of the state is looked at."""
    _, k, v = net.read(x_BI)
    s = 0.9 * s + k[..., None] * v[..., None, :]
    return s, s.amax((2, 3))


def full(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    """A decay for each entry."""
    q, k, v = net.read(x_BI)
    s = torch.sigmoid(k[..., None] + v[..., None, :]) * s + k[..., None] * v[..., None, :]
    return s, torch.einsum("bnd,bnde->bne", q, s)


def fed_back(net: Loop, x_BI: Tensor, state: State) -> Any:
    """What is read decides what is written next."""
    (s, y), (q, k, v) = state, net.read(x_BI)
    s = s + k[..., None] * (v + y)[..., None, :]
    return (s, torch.einsum("bnd,bnde->bne", q, s)), y


def without_gradient(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    q, k, v = net.read(x_BI)
    with torch.no_grad():
        k = k * 2
    s = s + k[..., None] * v[..., None, :]
    return s, torch.einsum("bnd,bnde->bne", q, s)


def complex_read(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    q, k, v = net.read(x_BI)
    s = s + k[..., None] * v[..., None, :]
    return s, (s * torch.tensor(1 + 2j) * q[..., None]).sum(2).abs()


def all_summed(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
    q, k, v = net.read(x_BI)
    s = s + k[..., None] * v[..., None, :]
    return s, (s * q[..., None]).sum(dim=None)


OTHERS: dict[str, tuple[Step, tuple[Any, ...]]] = {
    "a gradient of its own": (reversed_state, (HEADS,)),
    "cut": (cut, (HEADS,)),
    "delta rule": (delta, (HEADS,)),
    "bent": (bent, (HEADS,)),
    "seen": (seen, (HEADS,)),
    "a decay for each entry": (full, (HEADS,)),
    "a decay for each row": (by_rows, (HEADS,)),
    "a complex number": (complex_read, (HEADS,)),
    "all summed": (all_summed, (HEADS,)),
    "fed back": (fed_back, (HEADS, (B, N, E))),
    "without a gradient": (without_gradient, (HEADS,)),
}


def inputs() -> Tensor:
    return torch.randn(T, B, INPUTS)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_carries_are_found(name: str) -> None:
    step, sizes, expected = LINEAR[name]
    found = linear_carries(captured(Loop(step, *sizes), inputs()))
    assert [core.carry for core in found] == expected


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_as_they_are(name: str) -> None:
    step, sizes = OTHERS[name]
    assert not linear_carries(captured(Loop(step, *sizes), inputs()))
    assert compare(Loop(step, *sizes), (inputs(),), segment=4)[0] == []


@pytest.mark.variants(12)
@pytest.mark.parametrize("options", [{"segment": 4}, {"segment": 11, "schedule": "standard"}], ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_steps_done_together_are_those_one_by_one(name: str, options: dict[str, Any]) -> None:
    step, sizes, _ = LINEAR[name]
    assert compare(Loop(step, *sizes), (inputs(),), **options)[0] == []


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["gated", "columns"])
def test_they_are_so_as_kernels(name: str) -> None:
    step, sizes, _ = LINEAR[name]
    assert compare(Loop(step, *sizes), (inputs(),), lowering="inductor", segment=4, tolerance=1e-11)[0] == []


@pytest.mark.parametrize("between", [Reversed.apply, Tensor.detach], ids=["function", "detach"])
@pytest.mark.parametrize("name", ["key", "written"])
def test_a_gradient_of_its_own_is_kept_where_an_outer_product_is_taken_apart(between: Any, name: str) -> None:
    def step(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
        q, k, v = net.read(x_BI)
        if name == "key":
            s = s + between(k)[..., None] * v[..., None, :]
        else:
            s = s + between(k[..., None] * v[..., None, :])
        return s, torch.einsum("bnd,bnde->bne", q, s)

    net = Loop(step, HEADS)
    assert len(linear_carries(captured(net, inputs()))) == (name == "key")
    assert compare(net, (inputs(),), segment=4)[0] == []


def test_states_between_are_not_made() -> None:
    """As many values of a segment have the size of the state, however many steps it has."""
    recurrence = captured(Loop(gated, HEADS), inputs())
    context = Context(tree("store_all", Problem(T, 4)), recurrence)
    marked = run_on_step(("linear-steps",), recurrence.step, context)

    def states(step: Any, steps: int) -> int:
        graph = trace(replace(recurrence, step=step), steps, decompose=False).graph.graph
        return sum(is_state(node.meta.get("val")) for node in graph.nodes)

    assert states(recurrence.step, 8) > 1.8 * states(recurrence.step, 4)
    assert states(marked, 8) == states(marked, 4)


def is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == B * N * D * E


def test_decays_of_nothing_and_of_everything_stay_finite() -> None:
    """Decays are not divided by: one of zero forgets, and neither gives NaN."""

    def step(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
        q, k, v = net.read(x_BI)
        gate = (x_BI[:, :1] > 0).to(x_BI.dtype)[..., None, None]
        s = gate * s + k[..., None] * v[..., None, :]
        return s, torch.einsum("bnd,bnde->bne", q, s)

    net = Loop(step, HEADS)
    assert linear_carries(captured(net, inputs()))
    assert compare(net, (inputs(),), segment=4)[0] == []


def test_what_is_divided_by_zero_is_infinite_as_in_eager() -> None:
    def step(net: Loop, x_BI: Tensor, s: Tensor) -> Any:
        _, k, v = net.read(x_BI)
        s = s + k[..., None] * v[..., None, :]
        return s, (s / 0.0 * torch.ones(D, 1)).sum(2)

    net, x = Loop(step, HEADS), inputs()
    assert linear_carries(captured(net, x))
    y = reroll.compile(net, lowering="eager", segment=4)(x)[0]
    assert torch.equal(y.isnan() | y.isinf(), torch.ones_like(y, dtype=torch.bool))


def test_segments_are_longer_where_most_of_a_step_is_linear() -> None:
    class Beside(nn.Module):
        """A large vector beside a small matrix."""

        def forward(self, x_TB: Tensor) -> Tensor:
            s, h_BH = x_TB.new_zeros(D, D), x_TB.new_zeros(x_TB.shape[1], 50_000)
            for x_B in x_TB:
                s = s + torch.outer(x_B[:D], x_B[:D])
                h_BH = torch.tanh(h_BH + x_B[:, None])
            return h_BH.sum() + s.sum()

    large = captured(Loop(retention, HEADS), torch.randn(40, B, INPUTS))
    small = captured(Beside(), torch.randn(40, D))
    assert [len(linear_carries(each)) for each in (large, small)] == [1, 1]
    assert usual_segment(large, Options()) == 16
    assert usual_segment(large, Options(passes=("merge-gradients",))) < 16
    assert usual_segment(small, Options()) < 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_types_stay(dtype: torch.dtype) -> None:
    assert not cores_module.may_be_linear(torch.zeros(2, 64, 64, dtype=dtype))


def test_it_is_a_pass_that_may_be_left_out() -> None:
    passes = tuple(name for name in reroll.DEFAULT_PASSES if name != "linear-steps")
    assert compare(Loop(retention, HEADS), (inputs(),), segment=4, passes=passes)[0] == []


def test_small_states_and_random_steps_stay() -> None:
    recurrence = captured(Loop(attention, HEADS), inputs())
    assert not linear_carries(replace(recurrence, random=True))
    assert not candidates(recurrence.step.graph, [torch.zeros(2, 3, 8, 64)])
