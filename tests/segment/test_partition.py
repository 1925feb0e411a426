"""What is saved and what is computed again, for small steps: the fewest bytes that the backward can be made from.

``x`` and ``w`` are inputs of the step that stay alive anyway, but where a row says so. What is saved is given by the
operation that made it, with its number; what is computed again by the operations of the forward that the backward does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from reroll.errors import OptionError
from reroll.segment.cut.late import make_late
from reroll.segment.cut.partition import Cut, partition
from reroll.segment.cut.policy import NO_POLICY, Policy
from reroll.segment.cut.split_forward import without_outputs

B, H = 4, 8
FLOATS = 4 * B * H
Step = Callable[[Tensor, Tensor], Tensor]


def inputs() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, B * H).reshape(B, H).sin().requires_grad_()
    return x, torch.linspace(-1, 1, H * H).reshape(H, H).cos().requires_grad_()


def joint(step: Step) -> fx.GraphModule:
    """The result of a step, and then the gradients of x and w."""

    def run(primals: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, ...]:
        result = step(*primals)
        return (result, *torch.autograd.grad(result, primals, tangents, allow_unused=True))

    torch.manual_seed(0)
    made: fx.GraphModule = make_fx(run)(list(inputs()), [torch.ones(B, H)])
    made.graph.eliminate_dead_code()
    made.graph.find_nodes(op="placeholder")[1].meta["constant"] = "w"
    return made


def done(module: fx.GraphModule) -> Counter[str]:
    """How often each operation is done."""
    names = (getattr(node.target, "overloadpacket", None) for node in module.graph.nodes)
    return Counter(name.__name__ for name in names if name is not None)


def again(whole: fx.GraphModule, cut: Cut) -> set[str]:
    """The operations that are done more often than in the joint graph."""
    return set(done(cut.forward) + done(cut.backward) - done(whole))


def tanh(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def twice(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x @ w) @ w)


def square(x: Tensor, w: Tensor) -> Tensor:
    v = x @ w
    return v * v


def chain(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.sin(torch.sin(x)))


def behind_a_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.sin(torch.sin(x @ w)))


def spike(x: Tensor, w: Tensor) -> Tensor:
    v = x @ w
    return (v > 0).to(v.dtype) * x


def rounded(x: Tensor, w: Tensor) -> Tensor:
    return torch.floor(3 * x) * x


def divided(x: Tensor, w: Tensor) -> Tensor:
    return torch.div(x.detach(), 0.3, rounding_mode="floor") * x


def cast(x: Tensor, w: Tensor) -> Tensor:
    return (3 * x).long() * x


def normed(x: Tensor, w: Tensor) -> Tensor:
    return x / (x * x).sum(1, keepdim=True)


def noisy(x: Tensor, w: Tensor) -> Tensor:
    return torch.rand_like(x) * x


def turned(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).t().contiguous().view(B, H) * x


def outer(x: Tensor, w: Tensor) -> Tensor:
    rows = x.view(2, 2, H).transpose(0, 1)
    return (rows.unsqueeze(-1) @ rows.exp().unsqueeze(-2)).sum(-1).view(B, H)


HELD, NONE = {0, 1}, set[int]()
OUTER = {"view", "transpose", "unsqueeze", "expand", "clone", "_unsafe_view", "exp"}
CUTS: dict[str, tuple[Step, dict[str, Any], dict[str, int], set[str]]] = {
    "a result": (tanh, {}, {"aten.tanh": 1}, set()),
    "a product": (square, {}, {"aten.mm": 1}, set()),
    "nothing, as x is there": (chain, {}, {}, {"sin"}),
    "x, where it is not": (chain, {"held": NONE}, {"input": 1}, {"sin"}),
    "one value for three": (behind_a_product, {}, {"aten.mm": 1}, {"sin"}),
    "a comparison, the cast of which is made again": (spike, {}, {"aten.gt": 1}, {"_to_copy"}),
    "a rounding": (rounded, {}, {"aten.floor": 1}, set()),
    "a division that rounds": (divided, {}, {"aten.div": 1}, set()),
    "a cast to whole numbers": (cast, {}, {"aten._to_copy": 1}, set()),
    "a sum": (normed, {}, {"aten.sum": 1}, set()),
    "random numbers": (noisy, {}, {"aten.rand_like": 1}, set()),
    "what a view and its copy are of": (turned, {}, {"aten.tanh": 1}, {"t", "clone", "view"}),
    "nothing that batched products have laid out": (outer, {}, {}, OUTER),
    "replayed: the product again": (square, {"replay": True}, {}, {"mm"}),
    "replayed: both products again, neither of them after the other": (
        twice,
        {"replay": True},
        {"aten.tanh": 1},
        {"mm", "tanh"},
    ),
    "replayed: no decision": (spike, {"replay": True}, {"aten.gt": 1}, {"_to_copy"}),
    "keep=sin": (behind_a_product, {"policy": Policy(keep=("sin",))}, {"aten.sin": 2, "aten.cos": 1}, set()),
    "keep=mm against replay": (square, {"replay": True, "policy": Policy(keep=("mm",))}, {"aten.mm": 1}, set()),
    "recompute=tanh": (tanh, {"policy": Policy(recompute=("tanh",))}, {"aten.mm": 1}, {"tanh"}),
    "recompute=both": (tanh, {"policy": Policy(recompute=("tanh", "mm"))}, {}, {"tanh", "mm"}),
    "recompute=sum": (normed, {"policy": Policy(recompute=("sum",))}, {}, {"mul", "sum"}),
}


def cut_of(whole: fx.GraphModule, held: set[int] = HELD, policy: Policy = NO_POLICY, **how: bool) -> Cut:
    return partition(whole, 1, held, policy, **{"pack": False, "replay": False, **how})


@pytest.mark.parametrize("name", CUTS)
def test_what_is_saved_and_what_is_made_again(name: str) -> None:
    step, how, saved, repeated = CUTS[name]
    whole = joint(step)
    cut = cut_of(whole, **how)
    assert Counter(value.op for value in cut.tape) == saved
    assert again(whole, cut) == repeated
    primals, tangent = inputs(), torch.linspace(-1, 3, B * H).reshape(B, H)
    torch.manual_seed(0)
    result, *kept = cut.forward(*primals)
    torch.manual_seed(0)
    expected = step(*primals)
    assert torch.equal(result, expected)
    gradients = torch.autograd.grad(expected, primals, tangent, allow_unused=True)
    found = cut.backward(*kept, tangent)
    for left, right in zip(found, [each for each in gradients if each is not None], strict=True):
        torch.testing.assert_close(left, right)


BYTES: dict[str, tuple[Step, dict[str, Any], float, float]] = {
    "a result": (tanh, {}, FLOATS, FLOATS),
    "x and w too, where they are not there": (tanh, {"held": NONE}, 2 * FLOATS + 4 * H * H, 2 * FLOATS + 4 * H * H),
    "a truth value is a byte": (spike, {}, B * H, FLOATS),
    "packed, a bit": (spike, {"pack": True}, B * H / 8, FLOATS),
    "a column": (normed, {}, 4 * B, 4 * B),
    "three values, as plain BPTT has it": (behind_a_product, {}, FLOATS, 3 * FLOATS),
}


@pytest.mark.parametrize("name", BYTES)
def test_the_bytes_that_are_kept_and_that_plain_backpropagation_would_keep(name: str) -> None:
    step, how, kept, plain = BYTES[name]
    cut = cut_of(joint(step), **how)
    assert cut.kept == pytest.approx(kept)
    assert cut.plain == pytest.approx(plain)


REFUSED: dict[str, tuple[Step, str, str]] = {
    "a comparison": (spike, "gt", "is a decision (a comparison, rounding or index)"),
    "a rounding": (rounded, "floor", "is a decision (a comparison, rounding or index)"),
    "a division that rounds": (divided, "div", "is a decision (a comparison, rounding or index)"),
    "random numbers": (noisy, "rand_like", "is made of random numbers, which would be others"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wish_that_cannot_be_followed(name: str) -> None:
    step, rule, reason = REFUSED[name]
    with pytest.raises(OptionError) as caught:
        cut_of(joint(step), policy=Policy(recompute=(rule,), where="a line"))
    assert f"cannot be recomputed: it {reason}" in str(caught.value)


def test_what_is_kept_and_repeated_at_once_is_refused() -> None:
    with pytest.raises(OptionError, match="both hold of a value of shape"):
        cut_of(joint(tanh), policy=Policy(keep=("tanh",), recompute=("aten.tanh",)))


# A forward in two: what its outputs alone need comes after what is saved.

WIDE = 512


def last_layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) @ w


def last_layer_and_noise(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(torch.tanh(x @ w) @ w.detach(), 0.5)


def nothing_after(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def forward_of(step: Step, wide: int) -> fx.GraphModule:
    x, w = torch.randn(wide, wide, requires_grad=True), torch.randn(wide, wide, requires_grad=True)

    def run(primals: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, ...]:
        result = step(*primals)
        return (result, *torch.autograd.grad(result, primals, tangents))

    made: fx.GraphModule = make_fx(run, tracing_mode="fake")([x, w], [torch.ones(wide, wide)])
    made.graph.eliminate_dead_code()
    return partition(made, 1, {0, 1}, NO_POLICY, pack=False).forward


def test_what_only_outputs_need_is_a_graph_of_its_own() -> None:
    forward = forward_of(last_layer, WIDE)
    parts = without_outputs(forward, 1)
    assert parts is not None
    assert (done(parts.taping)["mm"], done(parts.rest)["mm"]) == (1, 1)
    given = [torch.randn(WIDE, WIDE), torch.randn(WIDE, WIDE)]
    expected, *saved = forward(*given)
    results = parts.taping(*given)
    assert all(map(torch.equal, results[: parts.saved], saved))
    (output,) = parts.rest(*(given[n] for n in parts.inputs), *(results[n] for n in parts.results))
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("step", "wide"),
    [(last_layer_and_noise, WIDE), (nothing_after, WIDE), (last_layer, 8)],
    ids=["random numbers", "nothing is left", "too little to pay for a call"],
)
def test_a_forward_stays_whole(step: Step, wide: int) -> None:
    assert without_outputs(forward_of(step, wide), 1) is None


# What a backward makes again of saved values comes right before its first use, where that holds less.


def joined(saved: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    wide = torch.cat([saved, saved])
    return (wide * grad.repeat(4, 1).tanh().sum(0), saved)


def summed(saved: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    small = saved.sum(1)
    return (small * (grad * 2).tanh().exp().sum(1),)


def drawn(saved: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    wide = torch.cat([torch.rand_like(saved), saved])
    return (wide * torch.rand_like(grad).tanh().sum(0), saved)


Half = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def half_of(function: Half) -> fx.GraphModule:
    def half(saved: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        return function(saved, tangents)

    made: fx.GraphModule = make_fx(half, tracing_mode="fake")(torch.randn(8, 8), torch.randn(8, 8))
    for node, name in zip(made.graph.find_nodes(op="placeholder"), ("saved", "tangents_1"), strict=True):
        node.target = name
    return made


@pytest.mark.parametrize(
    ("function", "first"), [(joined, "repeat"), (summed, "sum"), (drawn, "rand_like")], ids=["wide", "small", "drawn"]
)
def test_what_comes_first(function: Half, first: str) -> None:
    half, given = half_of(function), [torch.randn(8, 8), torch.randn(8, 8)]
    torch.manual_seed(0)
    expected = half(*given)
    make_late(half)
    names = [str(node.target).split(".")[1] for node in half.graph.nodes if node.op == "call_function"]
    assert names[0] == first
    torch.manual_seed(0)
    assert all(map(torch.equal, half(*given), expected))
