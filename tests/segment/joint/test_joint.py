"""The joint graph of a segment: what is traced directly, and what has to be made functional or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import reroll
import reroll.segment.joint.graph as joint
from agreement import QUICK, compare
from captured import captured
from reroll.graph.private import operator_name
from reroll.segment.trace import trace

T, B, H = 9, 2, 4

SINGULAR: Any = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # torch has no type for it


class Loop(nn.Module):
    """A carry that ``step(modules, x, h)`` makes."""

    def __init__(self, step: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.step, self.layers = step, nn.ModuleList(layers)

    def forward(self, x_TBH: Tensor, h_BH: Tensor) -> Tensor:
        for t in range(x_TBH.shape[0]):
            h_BH = self.step(self.layers, x_TBH[t], h_BH)
        return h_BH


class Doubling(torch.autograd.Function):
    """Doubles; its backward writes into a fresh tensor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        made = torch.zeros_like(gradient)
        made.add_(gradient)
        return made * 2


def doubled(layers: Any, x: Tensor, h: Tensor) -> Tensor:
    made: Tensor = torch.tanh(Doubling.apply(layers[0](x)) + h)  # type: ignore[no-untyped-call]
    return made


class DoublingByRows(Doubling):
    """Its backward writes into a part of a fresh tensor."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        made = torch.zeros_like(gradient)
        made[:1].add_(gradient[:1])
        made[1:].add_(gradient[1:])
        return made * 2


def doubled_by_rows(layers: Any, x: Tensor, h: Tensor) -> Tensor:
    made: Tensor = torch.tanh(DoublingByRows.apply(layers[0](x)) + h)  # type: ignore[no-untyped-call]
    return made


def written_by_rows(layers: Any, x: Tensor, h: Tensor) -> Tensor:
    made: Tensor = layers[0](x) + h
    made[0] += 0.5
    return torch.tanh(made)


STEPS: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module], tuple[bool, bool]]] = {
    "plain": (lambda m, x, h: torch.tanh(m[0](x) + h), lambda: nn.Linear(H, H), (True, False)),
    "writes inside of a cell": (lambda m, x, h: m[0](x, h), lambda: nn.GRUCell(H, H), (True, False)),
    "draws": (
        lambda m, x, h: functional.dropout(torch.tanh(m[0](x) + h), 0.5),
        lambda: nn.Linear(H, H),
        (True, False),
    ),
    "writes in the backward": (doubled, lambda: nn.Linear(H, H), (True, False)),
    "writes a part in the backward": (doubled_by_rows, lambda: nn.Linear(H, H), (True, True)),
    "writes a part": (written_by_rows, lambda: nn.Linear(H, H), (False, True)),
    "counts batches": (lambda m, x, h: torch.tanh(m[0](x + h)), lambda: nn.BatchNorm1d(H), (True, False)),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", STEPS)
def test_both_ways_to_trace_are_right_and_taken_where_they_should(name: str, double_precision: None) -> None:
    step, layer, ways = STEPS[name]
    with (
        mock.patch.object(joint, "_traced", wraps=joint._traced) as direct,
        mock.patch.object(joint, "aot_export_joint_simple", wraps=aot_export_joint_simple) as export,
    ):
        found, made = compare(Loop(step, layer()), (torch.randn(T, B, H), torch.randn(B, H)))
    assert not found
    assert made[0].recurrences
    assert (direct.called, export.called) == ways


EXTRAS: dict[str, Callable[[Tensor], Tensor]] = {
    "directly": lambda x: x,
    "functional": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "with an update": lambda x: x.clone().add_(1.0),
}


MATRICES: dict[str, Callable[[Tensor], Tensor]] = {
    "inv": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, a + 1.0),
    "solve a vector": lambda a: torch.linalg.solve(a, a[:, 0])[:, None] + a,
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT + a.diagonal().sign().diag()),
    "several": lambda a: torch.linalg.inv(torch.stack([a, 2 * a])).sum(0) @ torch.linalg.inv(a),
    "with an update": lambda a: torch.linalg.inv(a.clone().mul_(2.0)),
    "eigenvalues": lambda a: torch.linalg.eigvalsh(a + a.mT + torch.arange(float(H)).diag()) * a,
}


class Matrices(nn.Module):
    """Reads a factor of a matrix at each step: with zero it is singular."""

    steps: Tensor

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(H, H)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x_THH: Tensor, factor_T: Tensor) -> Tensor:
        h_HH = torch.zeros_like(x_THH[0])
        for t in range(x_THH.shape[0]):
            matrix_HH = (0.1 * self.linear(x_THH[t] + h_HH) + 3 * torch.eye(H)) * factor_T[t]
            h_HH = torch.tanh(0.1 * self.function(matrix_HH))
            self.steps += 1
        return h_HH


@pytest.mark.parametrize("function", MATRICES.values(), ids=MATRICES)
def test_a_step_raises_what_torch_raises_for_some_matrices(
    function: Callable[[Tensor], Tensor], double_precision: None
) -> None:
    torch.manual_seed(0)
    model, inputs = Matrices(function), (torch.randn(T, H, H), torch.ones(T))
    assert not compare(model, inputs)[0]
    if function is MATRICES["eigenvalues"]:
        return
    compiled = torch.compile(model, backend="reroll", options=QUICK)
    wrong, before = torch.ones(T), model.steps.clone()
    wrong[T // 2] = 0.0
    with pytest.raises(SINGULAR) as expected:
        model(inputs[0], wrong)
    model.steps.copy_(before)
    with pytest.raises(SINGULAR) as raised:
        compiled(inputs[0], wrong)
    assert str(raised.value) == str(expected.value)
    assert torch.equal(model.steps, before)
    compiled(*inputs).sum().backward()


DROPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: functional.dropout(h, 1.0),
    "some of it": lambda h: torch.cat([functional.dropout(h[:1], 1.0), functional.dropout(h[1:], 0.5)]),
    "in place": lambda h: functional.dropout(h * 1, 1.0, True, True),
    "attention": lambda h: functional.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=1.0)[0],
    "features": lambda h: functional.feature_alpha_dropout(h[..., None], 1.0, True)[..., 0],
    "of nothing": lambda h: h + functional.dropout(h[:0], 0.5).sum(),
    "that draws all the same": lambda h: torch.native_dropout(h, 1.0, True)[0],
}


@pytest.mark.parametrize("drop", DROPPED.values(), ids=DROPPED)
def test_what_drops_all_draws_as_torch_does(drop: Callable[[Tensor], Tensor], double_precision: None) -> None:
    def step(layers: Any, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(layers[0](x) + h) + drop(h)

    found, made = compare(Loop(step, nn.Linear(H, H)), (torch.randn(T, B, H), torch.randn(B, H)))
    assert not found
    assert made[0].recurrences


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.9}], ids=["free", "budget"])
def test_anomaly_mode_does_not_look_at_values_while_a_step_is_traced(options: dict[str, Any]) -> None:
    def loop(x: Tensor, w: Tensor) -> Tensor:
        h = x.new_zeros(3, 4)
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] @ w + h)
        return h

    torch.manual_seed(0)
    x, w = torch.randn(9, 3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64)
    with torch.autograd.set_detect_anomaly(True):
        model = torch.compile(loop, backend="reroll", options={"lowering": "eager", **options})
        reroll.check(model, x, w.requires_grad_(), strict=True, measure=False)
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()


class Written(torch.autograd.Function):
    """A product whose backward writes its own into a fresh tensor (``out=``)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        value, weight = ctx.saved_tensors
        return torch.mm(grad, weight.t(), out=torch.empty_like(value)), value.t() @ grad


class Signs(nn.Module):
    """A carry through ``sgn``, whose gradient is zeros without memory; and a product that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H))

    def forward(self, x_TBH: Tensor, h_BH: Tensor) -> Tensor:
        apply: Any = Written.apply
        for t in range(x_TBH.shape[0]):
            h_BH = torch.tanh(apply(h_BH, self.weight) + x_TBH[t] + 0.1 * torch.sgn(h_BH + x_TBH[t]))
        return h_BH


@pytest.mark.inductor
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_outs_and_zeros_without_memory(lowering: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"lowering": lowering, "schedule": "standard", "segment": 2, "chunk": 2}
    x, h = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((T, B, H), (B, H)))
    model = torch.compile(Signs().double(), backend="reroll", options=options)
    reroll.check(model, x, h, strict=True, measure=False)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_on_a_card_hands_on_states_of_a_generator_only_with_dropout(dropout: float) -> None:
    """There they are memory that nobody wrote, on the computer or on the card."""
    aten = torch.ops.aten

    def trained(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout)
        states = (sums, seed, offset, dropout, [True, True, True, False])
        gradients = aten._scaled_dot_product_efficient_attention_backward(grad, q, k, v, None, out, *states)
        return (out, *gradients[:3])

    with FakeTensorMode() as mode:
        values = [torch.empty(2, 3, 8, 4) for _ in range(4)]
        graph = make_fx(trained)(*values)
    joint.leave_out_seeds(graph.graph)
    graph.graph.eliminate_dead_code()
    (backward,) = graph.graph.find_nodes(
        op="call_function", target=aten._scaled_dot_product_efficient_attention_backward.default
    )
    states = backward.args[7:9]
    assert all((node.target is aten.full.default) is not bool(dropout) for node in states)
    assert [node.meta["val"].dtype for node in states] == [torch.int64] * 2
    assert all(node.meta["val"].fake_mode is mode for node in graph.graph.find_nodes(op="placeholder"))


HANDED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "made": (torch.relu, "relu"),
    "detached": (lambda h: torch.tanh(h).detach(), "tanh"),
    "copied by the step": (lambda h: torch.tanh(h).clone(), "clone"),
    "a view": (lambda h: torch.tanh(h).t(), "clone"),
    "conjugated": (lambda h: torch.tanh(h).to(torch.complex64).conj(), "clone"),
    "an input": (lambda h: h, "clone"),
    "another result": (torch.sin, "clone"),
}


@pytest.mark.parametrize("name", HANDED)
def test_a_copy_is_given_only_of_what_is_not_memory_of_its_own(name: str) -> None:
    function, expected = HANDED[name]

    def step(h_HH: Tensor) -> tuple[Tensor, ...]:
        made = function(h_HH)
        return made.clone(memory_format=torch.contiguous_format), made if name == "another result" else h_HH * 2

    half: Any = make_fx(step, tracing_mode="fake")(torch.randn(H, H))
    before = half(value := torch.randn(H, H))
    joint._hand_on(half, [0])
    given = half.graph.output_node().args[0][0]
    assert str(given.target).split(".")[1] == expected
    assert torch.equal(half(value)[0], before[0])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_normalised_batch_is_in_parts_that_inductor_knows(training: bool, grad: bool) -> None:
    """Without gradients, too, where torch's operator may write by its schema, though it does not."""
    model = Loop(lambda layers, x_BH, h_BH: torch.tanh(layers[0](x_BH + h_BH)), nn.BatchNorm1d(H)).train(training)
    with torch.set_grad_enabled(grad):
        traced = trace(captured(model, torch.randn(T, B, H), torch.randn(B, H)), 2, decompose=True)
    assert "native_batch_norm" not in {operator_name(node) for node in traced.graph.graph.nodes}
